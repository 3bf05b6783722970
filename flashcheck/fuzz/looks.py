"""What a failure looks like: the coarsest words that still tell bugs apart.

One mistake shows in several checks and tensors. Those that share its arithmetic share a look: everything that
flows through dS is one, whichever gradient was worst; an O outside its bound and an O that the declared
algorithm does not give are one; NaN is NaN wherever it comes out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from flashcheck.checks import Judged, Record

NOT_A_NUMBER = "NaN or inf comes out"
_OF_TENSOR = {
    "O": "O is wrong",
    "LSE": "LSE is wrong",
    "dV": "dV is wrong",
    "dQ": "what goes through dS is wrong",
    "dK": "what goes through dS is wrong",
    "dBias": "what goes through dS is wrong",
    "dSink": "what goes through dS is wrong",
    "dScale": "what goes through dS is wrong",
}

STRONG_ELEMENTS = 32
STRONG_ROWS = 4
"""Wrong elements, and rows that hold them, from which a class that explains them all stands alone."""

_SYMPTOMS = re.compile(r"narrow format|zero|a constant factor is wrong")
"""Classes that say how the errors look, not which rule is wrong: other faults can look like them."""


def looks_of(judged: Judged, record: Record) -> tuple[str, ...]:
    """Of a failed check; empty where the check's name and message are all there is to say."""
    if record.check == "special.empty_rows":
        return _of_empty_rows(record)
    if record.where is None:
        return (record.check,) if judged.answers() else ()
    if record.check.startswith("forward"):
        wrong = [name for name, m in judged.measured.items() if m.over] or [record.where.tensor]
        bad = any(_strays(judged, name) for name in wrong)
    else:
        lines = (line.partition(": ") for line in record.evidence)
        wrong = [name for name, _, rest in lines if rest.endswith("elements over their bound")]
        wrong = wrong or [record.where.tensor]
        bad = math.isfinite(record.where.exact) and not math.isfinite(record.where.got)
    found = [_OF_TENSOR.get(name, name) for name in wrong]
    return tuple(dict.fromkeys(([NOT_A_NUMBER] if bad else []) + found))


def _of_empty_rows(record: Record) -> tuple[str, ...]:
    found = ["rows that see no key"]
    if "value nan" in record.message or "LSE is nan" in record.message:
        found.append(NOT_A_NUMBER)
    return tuple(found)


def _strays(judged: Judged, name: str) -> bool:
    """NaN or inf stands where the exact value is a number."""
    measured, bound = judged.measured[name], judged.bound.out if name == "O" else judged.bound.lse
    wrong = (measured.margin > 1) & ~measured.got.isfinite()
    return bool((wrong & bound.interval.exact.isfinite()).any())


def is_strong(judged: Judged, record: Record, kinds: Iterable[str]) -> bool:
    """The wrong elements are many enough for a class that explains them to stand alone."""
    where = record.where
    if where is None or any(_SYMPTOMS.search(kind) for kind in kinds):
        return False
    everything = {**judged.measured}
    if record.check.startswith("backward"):
        everything = judged.measured_gradients
    measured = everything.get(where.tensor)
    if measured is None:
        return False
    over = measured.margin > 1
    if over.ndim < 4:  # one number a row
        return int(over.sum()) >= STRONG_ROWS
    return int(over.sum()) >= STRONG_ELEMENTS and int(over.any(-1).sum()) >= STRONG_ROWS
