"""Ours beside the printed numbers: ``python -m tests.published [--draws N]``."""

from __future__ import annotations

import argparse
import math
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flashcheck.devices import interpret_without_gpu
from flashcheck.loading import load
from tests.published import batch_invariance, outliers, rounding_bias

KERNELS = ("torch.sdpa.flash", "torch.sdpa.math", "eager", "torch.flex.eager", "kernels:flash_attention")


def outlier_table(draws: int, console: Console) -> Table:
    table = Table(
        title="rms error on inputs with outliers (arXiv 2407.08608, table 3)",
        caption=f"head dim {outliers.HEAD_DIM}, {outliers.NUM_KEYS:,} keys, {draws} draws of 256 rows; "
        "last column: against the fp16 inputs",
    )
    table.add_column("attention", no_wrap=True)
    for name in ("printed", "ours", "ratio", "±", "own"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in track(outliers.rows(), "outliers", console=console, transient=True):
        ours = outliers.measure(row, draws, num_queries=256)
        ratio = ours.rms / row.printed
        error = ours.standard_error / row.printed
        table.add_row(
            row.name,
            f"{row.printed:.1e}",
            f"{ours.rms:.2e}",
            f"{ratio:.2f}",
            f"{error:.2f}",
            f"{ours.rms_of_attention:.1e}",
        )
    return table


def bias_table() -> Table:
    table = Table(title="bias of rounding P V to bf16, ulp away from zero (arXiv 2510.04212, section 3)")
    for name in ("probabilities", "predicted", "ours"):
        table.add_column(name, justify="right" if name != "probabilities" else "left")
    cases = (
        ("two are exactly 1", rounding_bias.PREDICTED, rounding_bias.bias(ties=2)),
        ("one is exactly 1", 0.0, rounding_bias.bias(ties=1)),
        ("two are equal, below 1", 0.0, rounding_bias.bias(ties=2, shift=math.log(1.37))),
    )
    for name, predicted, ours in cases:
        table.add_row(name, f"{predicted:.2f}", f"{ours.mean:+.4f} ± {ours.standard_error:.4f}")
    return table


def invariance_table(console: Console) -> Table:
    table = Table(title="elements of O that change when a sequence is computed without its batch, bf16")
    table.add_column("kernel")
    for name, num_queries in batch_invariance.QUERIES.items():
        table.add_column(f"{name} ({num_queries})", justify="right")
    for name in track(KERNELS, "batch invariance", console=console, transient=True):
        kernel = load(name)
        cells = []
        for num_queries in batch_invariance.QUERIES.values():
            seen = batch_invariance.invariance(kernel, num_queries, torch.bfloat16)
            cells.append("same bits" if not seen.changed else f"{seen.changed / seen.elements:.1%}")
        table.add_row(name, *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=16, help="draws of 256 rows per line of the first table")
    arguments = parser.parse_args()
    interpret_without_gpu()
    torch.set_num_threads(1)
    console = Console()
    console.print(outlier_table(arguments.draws, console))
    console.print(bias_table())
    console.print(invariance_table(console))


if __name__ == "__main__":
    main()
