"""A matrix unit whose arithmetic is known: the emulator's, behind the signature that the probe calls."""

from dataclasses import dataclass, replace

import torch

from flashcheck.arithmetic import IEEE_FP32, Accumulator
from flashcheck.emulator.units import multiply_add
from flashcheck.formats import FP32, Format, round_nearest, round_toward_zero
from flashcheck.probe.products import TF32
from flashcheck.probe.units import Unit


@dataclass(frozen=True, slots=True)
class EmulatedUnit(Unit):
    accumulator: Accumulator = IEEE_FP32
    truncates_operands: bool = False

    def multiply_add(self, a, b, c, device):
        del device
        if self.precision == "tf32":
            shorten = round_toward_zero if self.truncates_operands else round_nearest
            a, b = shorten(a, TF32), shorten(b, TF32)
        start = c.unsqueeze(-1).expand(*a.shape[:-1], b.shape[-1])
        return multiply_add(a.float(), b.float(), start.float(), self.accumulator, self.operands).double()


def emulated(operands: Format, accumulator: Accumulator, inner: int = 64, **changes) -> EmulatedUnit:
    unit = EmulatedUnit("emulated", "triton", operands, inner=inner, accumulator=accumulator)
    return replace(unit, **changes)


CPU = torch.device("cpu")
__all__ = ["CPU", "FP32", "emulated"]
