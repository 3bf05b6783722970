"""The report's charts, out of a certificate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashcheck.report.certificate import Certificate, PicturePart, TensorPart
from flashcheck.report.heat import heat_map
from flashcheck.report.svg import Axis, Frame, Mark, Series, spread
from flashcheck.report.terminal import SPEC_DEFAULTS, number, short

DTYPES = ("fp64", "fp32", "fp16", "bf16", "e4m3", "e5m2")
UNIT_ROUNDOFF = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "e4m3": 2.0**-4,
    "e5m2": 2.0**-3,
}
TOP_MARGIN = 1.2
"""End of the margin axes: an element over its bound stands between 1 and here, however far it is over."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart and its words; ``note`` explains what to look for."""

    title: str
    svg: str
    note: str
    dtypes: tuple[str, ...] = ()


def is_backward(tensor: str) -> bool:
    return tensor.startswith("d")


def pairs_of(certificate: Certificate) -> list[tuple[Figure | None, Figure | None]]:
    """Rows of (forward, backward): error against bound, margin by length, by head dim, distribution."""
    makers = (_error_against_bound, _margin_by_length, _margin_by_head_dim, _distribution)
    rows = []
    for maker in makers:
        sides = [
            maker(certificate, [t for t in certificate.tensors if is_backward(t.tensor) is backward])
            for backward in (False, True)
        ]
        if any(sides):
            rows.append((sides[0], sides[1]))
    return rows


def _series(tensors: Sequence[TensorPart], pairs: dict[int, list[tuple[float, float]]]) -> list[Series]:
    """One series per dtype, all tensors of the dtype together."""
    merged: dict[str, list[tuple[float, float]]] = {}
    for n, t in enumerate(tensors):
        merged.setdefault(t.dtype, []).extend(pairs.get(n, []))
    return [Series(dtype, f"c-{dtype}", points) for dtype, points in merged.items() if points]


def _names(tensors: Sequence[TensorPart]) -> str:
    return ", ".join(dict.fromkeys(t.tensor for t in tensors))


def _error_against_bound(certificate: Certificate, tensors: Sequence[TensorPart]) -> Figure | None:
    pairs = {
        n: list(zip(t.points.bound, t.points.error, strict=True)) for n, t in enumerate(tensors) if t.points
    }
    series = _series(tensors, pairs)
    if not series:
        return None
    low, high = spread([bound for s in series for bound, _ in s.points], widest=16)
    y_low = min(low, spread([e for s in series for _, e in s.points if e], widest=16)[0])
    y_low = max(y_low, low * 1e-6)
    frame = Frame(Axis(low, high, "bound", 10), Axis(y_low, high, "|error|", 10))
    frame.rule((low, low), (high, high), "limit", "error = bound")
    for s in series:
        frame.draw(s)
    for t in tensors:
        if t.worst is not None and t.points is not None:
            error = t.points.error[t.points.margin.index(max(t.points.margin))]
            frame.mark(Mark(t.worst.bound, error, _worst_title(certificate, t), f"c-{t.dtype}"))
    title = f"Error against bound: {_names(tensors)}"
    note = (
        "One dot per problem, its worst element; rings: the worst of all. Above the line the declared "
        "arithmetic cannot have produced the value. Dots at the lower edge have no error; values beyond an "
        "axis stand at its end."
    )
    return Figure(title, frame.svg(title), note, tuple(s.name for s in series))


def _worst_title(certificate: Certificate, t: TensorPart) -> str:
    spec = certificate.problems.get(t.worst_problem or "", {})
    return f"{t.dtype} {t.tensor}: margin {number(t.worst_margin)}, {short(spec)}, problem {t.worst_problem}"


def _by(certificate: Certificate, tensors: Sequence[TensorPart], key: str) -> Figure | None:
    def size(problem: str) -> int:
        spec: dict[str, Any] = {**SPEC_DEFAULTS, **certificate.problems[problem]}
        if key == "head dim":
            return int(spec["head_dim"])
        return max(int(spec["num_queries"]), int(spec["num_keys"]), 1)

    pairs = {
        n: [(float(size(p)), m) for p, m in zip(t.points.problem, t.points.margin, strict=True)]
        for n, t in enumerate(tensors)
        if t.points
    }
    series = _series(tensors, pairs)
    if not series:
        return None
    low, high = spread([x for s in series for x, _ in s.points], base=2)
    label = "head dim" if key == "head dim" else "longer of the two lengths"
    frame = Frame(Axis(low, high, label, 2), Axis(0.0, TOP_MARGIN, "worst margin"))
    frame.rule((low, 1.0), (high, 1.0), "limit", "bound")
    for s in series:
        frame.draw(s)
    title = f"Margin by {key}: {_names(tensors)}"
    note = f"One dot per problem. Margins that grow with the {key} would point at an error the model lacks."
    return Figure(title, frame.svg(title), note, tuple(s.name for s in series))


def _margin_by_length(certificate: Certificate, tensors: Sequence[TensorPart]) -> Figure | None:
    return _by(certificate, tensors, "length")


def _margin_by_head_dim(certificate: Certificate, tensors: Sequence[TensorPart]) -> Figure | None:
    return _by(certificate, tensors, "head dim")


def _distribution(certificate: Certificate, tensors: Sequence[TensorPart]) -> Figure | None:
    del certificate
    sums: dict[str, list[int]] = {}
    totals: dict[str, int] = {}
    for t in tensors:
        if t.histogram is None:
            continue
        counts = [*t.histogram.bins, t.histogram.above]
        known = sums.setdefault(t.dtype, [0] * len(counts))
        sums[t.dtype] = [a + b for a, b in zip(known, counts, strict=True)]
        totals[t.dtype] = totals.get(t.dtype, 0) + t.elements
    shares = {d: [c / totals[d] for c in counts] for d, counts in sums.items() if totals[d]}
    low, high = spread([x for counts in shares.values() for x in counts] or [0.1, 1.0], widest=12)
    if not shares:
        return None
    frame = Frame(Axis(0.0, TOP_MARGIN, "margin"), Axis(low / 10, high, "share of elements", 10))
    frame.rule((1.0, low / 10), (1.0, high), "limit", "bound")
    series = []
    for dtype, heights in shares.items():
        bins = len(heights) - 1
        ends = [*(n / bins for n in range(bins + 1)), TOP_MARGIN]
        steps: list[tuple[float, float]] = [
            (x, c) for n, c in enumerate(heights) for x in (ends[n], ends[n + 1])
        ]
        series.append(Series(dtype, f"c-{dtype}", steps, line=True))
        frame.draw(series[-1])
    title = f"All margins: {_names(tensors)}"
    note = "Share of elements per twentieth of the bound; elements without any error are left out."
    return Figure(title, frame.svg(title), note, tuple(s.name for s in series))


def ladder(certificates: Sequence[tuple[str, Certificate]]) -> Figure | None:
    """Relative rms error of O per dtype and certificate: measured (dot), predicted (bar), unit roundoff."""
    rows: list[tuple[str, str, TensorPart]] = []
    for n, (name, certificate) in enumerate(certificates, 1):
        number = f"{n}: " if len(certificates) > 1 else ""
        rows += [
            (f"{number}{t.dtype} {t.tensor}", name, t)
            for t in sorted(certificate.tensors, key=lambda t: (_rank(t.dtype), t.tensor != "O"))
            if t.rms_error is not None and t.tensor in ("O", "dQ", "dK", "dV")
        ]
    if not rows:
        return None
    values = [x for _, _, t in rows for x in (t.rms_error, t.rms_predicted, UNIT_ROUNDOFF[t.dtype]) if x]
    low, high = spread(values)
    frame = Frame(
        Axis(low, high, "rms error / rms of the exact values", 10),
        Axis(0.0, float(len(rows)), ""),
        height=64 + 20 * len(rows),
        left=70,
    )
    for n, (label, name, t) in enumerate(rows):
        y = len(rows) - n - 0.5
        across, height = frame.place(t.rms_error or low, y)
        predicted, _ = frame.place(t.rms_predicted or low, y)
        unit, _ = frame.place(UNIT_ROUNDOFF[t.dtype], y)
        words = f"{name}: {label} measured {t.rms_error:.3g}, predicted {t.rms_predicted:.3g}"
        frame.parts.append(
            f'<line class="unit" x1="{unit:.1f}" y1="{height - 8:.1f}" x2="{unit:.1f}" '
            f'y2="{height + 8:.1f}"/>'
            f'<line class="predicted c-{t.dtype}" x1="{predicted:.1f}" y1="{height - 6:.1f}" '
            f'x2="{predicted:.1f}" y2="{height + 6:.1f}"/>'
            f'<circle class="dot c-{t.dtype}" cx="{across:.1f}" cy="{height:.1f}" r="4">'
            f"<title>{words}</title></circle>"
            f'<text x="{frame.left - 6}" y="{height + 4:.1f}" text-anchor="end">{label}</text>'
        )
    title = "Dtype ladder: rms error"
    note = (
        "Median over problems with ordinary values. Dot: measured; bar: predicted from the declared "
        "arithmetic; dashes: the format's unit roundoff."
    )
    if len(certificates) > 1:
        note += " " + "; ".join(f"{n}: {name}" for n, (name, _) in enumerate(certificates, 1)) + "."
    return Figure(title, frame.svg(title, y_ticks=False), note)


def _rank(dtype: str) -> int:
    return DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES)


def heat_maps(certificate: Certificate) -> list[Figure]:
    """The worst problems' pictures, forward then backward, dtype by dtype."""
    order = {"margin": 0, "key_share": 1}
    parts = sorted(certificate.pictures, key=lambda p: (_rank(p.dtype), is_backward(p.tensor), order[p.kind]))
    return [_heat(certificate, part) for part in parts]


def _heat(certificate: Certificate, part: PicturePart) -> Figure:
    spec = certificate.problems.get(part.problem, {})
    finite = [v for row in part.values for v in row if math.isfinite(v)]
    largest = max(finite, default=0.0)
    rows = "key" if part.tensor in ("dK", "dV") else "row"
    if part.kind == "margin":
        title = f"{part.dtype} {part.tensor}: margin by {rows} and column"
        top, columns = 1.0, "column"
        note = f"White: no error; darkest: at the bound; red: outside. Ring: the worst element. {short(spec)}"
    else:
        title = f"{part.dtype} O: which keys the error can come from"
        top, columns = largest, "key"
        note = (
            "What a unit relative error of p moves in the output, by row and key; line: the worst row. "
            f"{short(spec)}"
        )
    where = f"batch {part.head[0]}, head {part.head[1]}"
    svg = heat_map(part.values, top, part.size, (rows, columns), part.worst, f"{title}, {where}")
    return Figure(title, svg, f"{note}, {where}.", (part.dtype,))
