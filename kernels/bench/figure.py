"""Speed against length, a panel a head dim, mask and pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernels.bench.grid import tflops
from kernels.bench.methods import CUDNN, FLASH2, FLEX, OURS

_STYLE = {OURS: ("#c1121f", "o"), CUDNN: ("#1d3557", "s"), FLEX: ("#2a9d8f", "^"), FLASH2: ("#8d99ae", "v")}


def draw(record: dict[str, Any], path: Path) -> None:
    """Write the figure; the name's ending says the format. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = record["grid"]
    panels = sorted({(row["head_dim"], row["causal"]) for row in rows})
    figure, axes = pyplot.subplots(
        2, max(1, len(panels)), figsize=(3.2 * max(1, len(panels)), 5.6), sharey="row", squeeze=False
    )
    for column, (head_dim, causal) in enumerate(panels):
        for line, kind in enumerate(("forward", "backward")):
            axis = axes[line][column]
            for method, (colour, marker) in _STYLE.items():
                points = sorted(
                    (row["length"], speed)
                    for row in rows
                    if (row["head_dim"], row["causal"]) == (head_dim, causal)
                    and (speed := tflops(row, method, kind)) is not None
                )
                if points:
                    lengths, speeds = zip(*points, strict=True)
                    axis.plot(lengths, speeds, color=colour, marker=marker, markersize=4, label=method)
            axis.set_xscale("log", base=2)
            ticks = sorted({row["length"] for row in rows})
            axis.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
            axis.grid(alpha=0.3, linewidth=0.5)
            axis.set_title(f"{kind}, d={head_dim}{', causal' if causal else ''}", fontsize=9)
            if column == 0:
                axis.set_ylabel("TFLOP/s")
            if line == 1:
                axis.set_xlabel("length")
    for line in axes:  # the axes of a row share their limits, which must wait for the last panel
        line[0].set_ylim(bottom=0)
    handles, labels = axes[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="upper center", ncols=4, frameon=False, fontsize=9)
    where = (
        f"{record['device']}, bf16, torch {record['torch']}, Triton {record['triton']}, {record['date'][:10]}"
    )
    figure.text(0.5, 0.005, where, ha="center", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.02, 1, 0.95))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
