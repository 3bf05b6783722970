"""Where the bad elements of a tensor lie, because the place names the fault."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.checks.judged import Judged


def census(judged: Judged, tensor: str) -> tuple[str, ...]:
    """Lines: how many elements are over their bound and where; NaN, inf and zero counts of both sides."""
    measured = judged.measured[tensor]
    exact = judged.bound.out if tensor == "O" else judged.bound.lse
    over = measured.margin > 1
    share = 100.0 * measured.over / max(measured.elements, 1)
    lines = [
        f"elements over the bound: {measured.over:,} of {measured.elements:,} ({share:.2g}%), {_where(over)}"
    ]
    got_count, exact_count = _special(measured.got), _special(exact.interval.exact)
    if got_count != exact_count:
        lines.append(f"NaN/inf/zero: got {got_count}, exact {exact_count}")
    return tuple(lines)


def _special(x: Tensor) -> str:
    return "/".join(str(int(flag.sum())) for flag in (torch.isnan(x), torch.isinf(x), x == 0))


def _where(over: Tensor) -> str:
    """The axes along which the bad elements are a proper part, in words."""
    names = ("batch", "head", "row", "column")[: over.ndim]
    parts = []
    for axis, name in enumerate(names):
        others = tuple(a for a in range(over.ndim) if a != axis)
        hit = over.any(others) if others else over
        count, size = int(hit.sum()), over.shape[axis]
        if count == size:
            continue
        indices = hit.nonzero().flatten().tolist()
        parts.append(f"{name} {_ranges(indices)} of {size}")
    return "in " + ", ".join(parts) if parts else "everywhere"


def _ranges(indices: list[int]) -> str:
    """``0-3, 8, 12-15`` and so on, cut after four ranges."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:4]]
    return ", ".join(shown) + (f" and {len(runs) - 4} more ranges" if len(runs) > 4 else "")
