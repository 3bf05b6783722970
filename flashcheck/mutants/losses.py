"""Losses of precision graded by size: the same kernel, one place of it rounded to fewer bits than declared.

A size is a number of significand bits, the hidden one included, that the place keeps; for the error of exp it
is a number of units in the last place of fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashcheck.formats import Format
from flashcheck.kernel import Kernel
from flashcheck.mutants.registry import kernel_with
from flashcheck.mutants.switches import Switches

FP32_BITS = 24


@dataclass(frozen=True, slots=True)
class Loss:
    """One place that loses precision.

    Attributes:
        name: also that of its switch. what: in words.
        of_input: the place is declared in the input format, not in fp32.
        ulps: the size is an error in ulps of fp32, not bits that are kept.
    """

    name: str
    what: str
    of_input: bool = False
    ulps: bool = False

    def sizes(self, fmt: Format) -> tuple[int, ...]:
        """From the largest loss to the smallest."""
        if self.ulps:
            return tuple(2**n for n in range(14, -1, -1))
        return tuple(range(4, fmt.precision if self.of_input else FP32_BITS))


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("scores", "scores rounded once more"),
        Loss("log2e", "the constant log2 e cut short"),
        Loss("exp", "exp off by so many ulp, up or down by its argument", ulps=True),
        Loss("p", "P rounded once more", of_input=True),
        Loss("row-sum", "the row sum rounded after every tile"),
        Loss("rescale", "the factor of the running maximum rounded"),
        Loss("accumulator", "the sum P V truncated after every tile"),
        Loss("output", "O rounded once more", of_input=True),
        Loss("lse", "the log-sum-exp rounded"),
        Loss("bwd-lse", "the stored log-sum-exp rounded in the backward"),
        Loss("bwd-delta", "delta rounded in the backward"),
        Loss("bwd-p", "P rounded once more in the backward", of_input=True),
        Loss("bwd-ds", "dS rounded once more in the backward", of_input=True),
        Loss("bwd-sums", "the sums dQ truncated after every tile"),
    )
}


class Graded(Switches):
    """No fault but one loss of a size."""

    def __init__(self, loss: Loss, size: int) -> None:
        super().__init__()
        self.loss, self.amount = loss, size

    def size(self, name: str) -> int | None:
        if name != self.loss.name:
            return None
        self.hits[name] += 1
        return self.amount


def lossy_kernel(loss: Loss, size: int) -> Kernel:
    """The control with the loss; it declares what the control declares."""
    return kernel_with(f"loss.{loss.name}.{size}", Graded(loss, size))
