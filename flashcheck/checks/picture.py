"""A small picture of an error for the terminal: row tiles down, key tiles across.

A cell is dark where the error of its rows points along what its keys contribute: a lost, doubled or
mis-scaled key tile is a dark column, a lost row tile a dark row, a wrong diagonal a staircase.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.checks.judged import Judged

SHADES = " .:-=+*#%@"
MOST_ROWS, MOST_COLUMNS = 6, 32


def error_picture(judged: Judged) -> tuple[str, ...]:
    """Lines for the head with the worst element of O; empty where there is nothing to draw."""
    measured = judged.measured["O"]
    p = judged.problem
    if measured.worst is None or not p.num_keys or not p.num_queries:
        return ()
    b, h, i, _ = measured.worst.index
    error = (measured.got[b, h] - judged.exact.out[b, h]).nan_to_num(0.0, 0.0, 0.0)
    weights, values = judged.exact.probabilities[b, h].nan_to_num(0.0), p.v[b, h // p.group].double()
    tile = judged.rules.arithmetic.block_keys or 16
    if tile >= p.num_keys:
        tile = -(-p.num_keys // 4)
    tile = max(tile, -(-p.num_keys // MOST_COLUMNS))
    height = max(min(16, -(-p.num_queries // 4)), -(-p.num_queries // MOST_ROWS))
    lines = [f"error along key tiles of {tile} (batch {b}, head {h}; worst in row {i}):"]
    for top in range(0, p.num_queries, height):
        rows = slice(top, min(top + height, p.num_queries))
        cells = [
            _along(error[rows], weights[rows, left : left + tile] @ values[left : left + tile])
            for left in range(0, p.num_keys, tile)
        ]
        margin = float(measured.margin[b, h, rows].max())
        text = "".join(SHADES[min(int(c * len(SHADES)), len(SHADES) - 1)] for c in cells)
        lines.append(f"rows {rows.start:>4}-{rows.stop - 1:<4} |{text}| margin up to {margin:.3g}")
    return tuple(lines)


def _along(error: Tensor, part: Tensor) -> float:
    """|cos| of the angle between two matrices; 0 where one is zero or not finite."""
    part = part.nan_to_num(0.0, 0.0, 0.0)
    size = float(error.norm() * part.norm())
    return abs(float((error * part).sum())) / size if size > 0 and torch.isfinite(torch.tensor(size)) else 0.0
