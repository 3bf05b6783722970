"""Processor time of a call on the host, launches left out: ``python -m kernels.bench.host``; needs no GPU.

The kernels are compiled for Hopper and looked up as ever, but what would launch them does nothing. Prints the
fewest microseconds a call over several rounds, of the forward, the backward and both through autograd.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
from triton.compiler.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import options, tuning
from kernels.bench.offline import NoDriver
from kernels.hopper import calls
from kernels.interface import backward, flash_attention, forward

_ROUNDS, _CALLS = 20, 50


def launch_nothing(seen: list[tuple[Any, ...]] | None = None) -> None:
    """From here on this process takes CPU tensors for Hopper's, and launches end at the driver.

    ``seen`` collects, of each launch, the compiled kernel and what its launcher was given.
    """
    triton.runtime.driver.set_active(NoDriver())
    for module in (tuning, calls):
        setattr(module, "architecture", cache(lambda _device: "sm90"))  # noqa: B010
    setattr(options, "interpreted", lambda: True)  # noqa: B010 - which lets CPU tensors pass
    setattr(options, "_on_host", lambda _x: False)  # noqa: B010

    def run(*arguments: Any) -> None:
        # As Triton's own launcher, which takes descriptors apart.
        flat: list[Any] = []
        for x in arguments:
            if isinstance(x, TensorDescriptor):
                flat += [x.base.data_ptr(), *x.shape, *x.strides]
            else:
                flat.append(x)

    def note(kernel: Any, *arguments: Any) -> None:
        assert seen is not None
        seen.append((kernel, *arguments))

    def load(kernel: Any) -> None:
        kernel._run = run if seen is None else partial(note, kernel)

    CompiledKernel._init_handles = load


def calls_of(length: int, head_dim: int) -> dict[str, Callable[[], Any]]:
    """What is timed, by name: causal calls of 2 heads, and the same with two packed segments."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, length, head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator).bfloat16() for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, length // 2, length], dtype=torch.int32)
    found: dict[str, Callable[[], Any]] = {}
    for packed, packing in (("", {}), (", packed", {"cu_seqlens_q": ends, "cu_seqlens_k": ends})):
        given: dict[str, Any] = {"causal": "top_left", **packing}
        run = partial(flash_attention, **given)
        out, lse = forward(q, k, v, **given)
        found |= {
            f"forward{packed}": partial(run, q, k, v),
            f"backward{packed}": partial(backward, dout, q, k, v, out, lse, **given),
            f"both, through autograd{packed}": partial(_both, run, leaves, dout),
        }
    return found


def _both(run: Callable[..., Any], leaves: list[torch.Tensor], dout: torch.Tensor) -> Any:
    return torch.autograd.grad(run(*leaves), leaves, dout)


def microseconds(run: Callable[[], Any]) -> float:
    """Processor time of a call, the least of several rounds."""
    run()
    least = float("inf")
    for _ in range(_ROUNDS):
        start = time.process_time()
        for _ in range(_CALLS):
            run()
        least = min(least, (time.process_time() - start) / _CALLS)
    return least * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.host", description=__doc__)
    parser.add_argument("--profile", action="store_true", help="also where the time goes")
    arguments = parser.parse_args()
    launch_nothing()
    for name, run in calls_of(128, 128).items():
        print(f"{name}: {microseconds(run):.0f} us")
        if arguments.profile:
            with cProfile.Profile() as profile:
                for _ in range(10 * _CALLS):
                    run()
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)
    return 0


if __name__ == "__main__":
    sys.exit(main())
