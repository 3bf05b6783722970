"""Small SVG charts without a plotting library: one viewBox, colours from the page's CSS variables.

Points are drawn as zero-length strokes of one path per series, so that thousands cost a few kilobytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 380, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 10, 42  # right: half of the last label

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic axis; values beyond its ends are drawn at the ends.

    Attributes:
        low, high: ends, positive where ``base`` is given.
        label: what it shows.
        base: of the logarithm (2 or 10); None: linear.
    """

    low: float
    high: float
    label: str
    base: int | None = None

    def at(self, x: float) -> float:
        """Position in 0..1."""
        if math.isnan(x):
            return 1.0
        if self.base is None:
            share = (x - self.low) / (self.high - self.low)
        elif x <= 0:
            share = 0.0
        else:
            share = math.log(min(x, 1e300) / self.low) / math.log(self.high / self.low)
        return min(1.0, max(0.0, share))

    def ticks(self) -> list[tuple[float, str]]:
        """Values with their labels: round numbers, seven at most."""
        if self.base is None:
            step = _round_step((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            count = math.floor((self.high - first * step) / step + 1e-9) + 1
            return [((first + n) * step, f"{(first + n) * step:.3g}") for n in range(count)]
        first = math.ceil(math.log(self.low, self.base) - 1e-9)
        last = math.floor(math.log(self.high, self.base) + 1e-9)
        step = max(1, math.ceil((last - first + 1) / 7))
        powers = range(first, last + 1, step)
        if self.base == 2:
            return [(2.0**n, f"{2**n}" if n >= 0 else f"2{str(n).translate(SUPERSCRIPT)}") for n in powers]
        return [(10.0**n, f"10{str(n).translate(SUPERSCRIPT)}") for n in powers]


def _round_step(x: float) -> float:
    power = 10.0 ** math.floor(math.log10(x))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= x * 0.999)


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour: ``css`` names the class that colours them."""

    name: str
    css: str
    points: Sequence[tuple[float, float]]
    line: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A ring with a tooltip and a short label."""

    x: float
    y: float
    title: str
    css: str


class Frame:
    """A plot area with two axes; ``parts`` collects what is drawn inside."""

    def __init__(self, x: Axis, y: Axis, height: int = HEIGHT, left: int = LEFT) -> None:
        self.x, self.y, self.height, self.left = x, y, height, left
        self.parts: list[str] = []

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a pair of values."""
        across, down = WIDTH - self.left - RIGHT, self.height - TOP - BOTTOM
        return self.left + across * self.x.at(x), TOP + down * (1 - self.y.at(y))

    def draw(self, series: Series) -> None:
        """Points, or a line through them."""
        placed = [self.place(x, y) for x, y in series.points]
        if series.line:
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
            self.parts.append(f'<path class="line {series.css}" d="{path}"/>')
        else:
            path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in placed)
            self.parts.append(f'<path class="dots {series.css}" d="{path}"/>')

    def mark(self, mark: Mark) -> None:
        x, y = self.place(mark.x, mark.y)
        self.parts.append(
            f'<circle class="ring {mark.css}" cx="{x:.1f}" cy="{y:.1f}" r="6">'
            f"<title>{escape(mark.title)}</title></circle>"
        )

    def rule(self, start: tuple[float, float], end: tuple[float, float], css: str, label: str) -> None:
        """A straight line with a label: at its end, or beside the middle of a slanted one."""
        (x1, y1), (x2, y2) = self.place(*start), self.place(*end)
        slanted = x1 != x2 and y1 != y2
        x, y, anchor = x2 - 4, y2 + (12 if y2 < TOP + 12 else -5), "end"
        if slanted:
            x, y, anchor = (x1 + x2) / 2 - 8, (y1 + y2) / 2 - 8, "end"
        self.parts.append(
            f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
            f'<text class="note" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>'
        )

    def svg(self, alt: str, y_ticks: bool = True) -> str:
        """The finished chart; ``y_ticks``: with a grid and numbers for the y axis."""
        bottom = self.height - BOTTOM
        grid = []
        for value, text in self.x.ticks():
            x, _ = self.place(value, self.y.low)
            grid.append(
                f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"/>'
                f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'
            )
        for value, text in self.y.ticks() if y_ticks else ():
            _, y = self.place(self.x.low, value)
            grid.append(
                f'<line class="grid" x1="{self.left}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
                f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
            )
        middle = (self.left + WIDTH - RIGHT) / 2
        label_y = (TOP + bottom) / 2
        return (
            f'<svg class="chart" viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(alt)}">'
            + "".join(grid)
            + "".join(self.parts)
            + f'<text class="label" x="{middle:.0f}" y="{self.height - 6}" text-anchor="middle">'
            f"{escape(self.x.label)}</text>"
            f'<text class="label" transform="translate(13 {label_y:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y.label)}</text></svg>"
        )


def spread(values: Sequence[float], base: int = 10, widest: int = 24) -> tuple[float, float]:
    """Ends of a logarithmic axis around the bulk of the positive, finite ``values``.

    Powers of ``base``; where they span more than ``widest`` decades the tails are left to the edges.
    """
    good = sorted(v for v in values if 0 < v < math.inf)
    if not good:
        return 0.1, 1.0
    low, high = good[0], good[-1]
    if math.log10(high / low) > widest:
        low, high = good[len(good) // 20], good[-1 - len(good) // 20]
        low = max(low, high / 10.0**widest)
    ends = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    return float(base) ** ends[0], float(base) ** max(ends[1], ends[0] + 1)
