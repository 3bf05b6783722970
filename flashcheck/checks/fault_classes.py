"""Classes of faults that users of attention kernels have reported in public, by letter.

Every check names the classes it is for, every seeded fault the class it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashcheck.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class FaultClass:
    """One class.

    Attributes:
        letter: as checks and mutants write it.
        title: what goes wrong.
        elsewhere: what answers for the class if no check does: "" where checks do.
    """

    letter: str
    title: str
    elsewhere: str = ""


FAULT_CLASSES: dict[str, FaultClass] = {
    c.letter: c
    for c in (
        FaultClass("A", "rows, tiles and sequences that see no key"),
        FaultClass("B", "running maximum, rescaling, state between tiles"),
        FaultClass("C", "causal alignment and the diagonal"),
        FaultClass("D", "sliding windows: width, side, visited tiles"),
        FaultClass("E", "ragged tails, loads and stores out of range, poison from hidden data"),
        FaultClass("F", "head dims: padding, special cases, value dim other than head dim"),
        FaultClass("G", "offsets wider than 32 bits"),
        FaultClass("H", "strides, layouts and views"),
        FaultClass("I", "grouped key/value heads"),
        FaultClass("J", "log-sum-exp: base, sign, layout, gradient"),
        FaultClass("K", "softcap: formula, order, derivative"),
        FaultClass("L", "bias, masks and ALiBi, values and gradients"),
        FaultClass("M", "dropout", "outside the contract: no kernel can declare dropout"),
        FaultClass("N", "races, results that change from run to run"),
        FaultClass("O", "outputs and workspaces that are never written"),
        FaultClass("P", "precision lost where fp32 is promised"),
        FaultClass("Q", "large finite inputs, NaN and inf"),
        FaultClass("S", "scale: sign, zero, default"),
        FaultClass("T", "split keys and the merge of partial results"),
        FaultClass("U", "paged caches and unused cache memory"),
        FaultClass("V", "sinks"),
        FaultClass("W", "composition of a batch"),
        FaultClass("X", "state between calls, caches, configurations"),
        FaultClass("Y", "8-bit formats and their scales"),
        FaultClass("Z", "compiler, interpreter and platform"),
        FaultClass("AA", "checkers that were fooled", "flashcheck audit: every seeded fault must be caught"),
    )
}


def fault_class(letter: str) -> FaultClass:
    """The class with this letter; raises UnknownNameError for any other."""
    try:
        return FAULT_CLASSES[letter]
    except KeyError:
        raise UnknownNameError("fault class", letter, FAULT_CLASSES) from None
