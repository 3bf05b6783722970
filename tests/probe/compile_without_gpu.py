"""Compiles the probe's kernels for Hopper on a machine with no GPU; run as a program by test_compiles.py."""

import sys

import torch
import triton
from triton.runtime.jit import JITFunction

from flashcheck.formats import BF16, E4M3, E5M2, FP16
from flashcheck.probe import functions, triton_code
from flashcheck.probe.casts import cast
from flashcheck.probe.units import triton_units
from kernels.bench.offline import NoDriver


def main():
    triton.runtime.driver.set_active(NoDriver())
    run, names = JITFunction.run, []

    def warm_up(self, *args, **kwargs):
        names.append(self.__name__)
        return run(self, *args, **{**kwargs, "warmup": True})

    JITFunction.run = warm_up
    cpu = torch.device("cpu")
    for unit in triton_units(compiled=True):
        a = torch.zeros(1, unit.rows, unit.inner)
        unit.multiply_add(a, torch.zeros(1, unit.inner, unit.columns), torch.zeros(1, unit.rows), cpu)
    x = torch.zeros(1024)
    for fmt in (FP16, BF16, E4M3, E5M2):
        cast(x, fmt, "triton")
    for function in functions.FUNCTIONS.values():
        functions.evaluate(function, "triton", x, x if function.binary else None)
    functions._measure_addition("triton", cpu)
    assert not triton_code.interpreted()
    sys.stdout.write(" ".join(f"{name}:{names.count(name)}" for name in sorted(set(names))))


if __name__ == "__main__":
    main()
