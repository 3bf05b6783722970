"""Scores that are large, tied, nearly tied, or sorted."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashcheck.formats import BF16, E4M3, E5M2, FP16, FP32
from flashcheck.golden.draw import Draw
from flashcheck.golden.entry import FORMATS, Entry, Sizes, entry, group
from flashcheck.golden.themes.ordinary import normals

DECADES = (2, 4, 5, 6, 8, 10, 13, 16, 20, 25, 30, 34, 37, 38)


RETRIES = {
    "huge_logits.fp32.1e5": 1,
    "huge_logits.fp32.1e16": 1,
    "huge_logits.fp16.1e10": 1,
    "huge_logits.fp16.1e13": 1,
    "huge_logits.e4m3.1e6": 1,
}
"""Problem -> how often it was drawn anew, because a largest score fell on a rounding boundary: LSE is that
score up to e^-1e5, on its upper side, and no precision tells it from a tie."""


@group("huge_logits", "scores from 1e2 to 1e38")
def huge_logits() -> Iterator[Entry]:
    for fmt in FORMATS:
        for power in DECADES:
            name = f"huge_logits.{fmt}.1e{power}"
            q, k, _ = normals(f"{name}{'/again' * RETRIES.get(name, 0)}", Sizes(4, 6, 4))
            # Few bits, never 0, nothing cancels: O is v up to e^-1e5, and all formats must round both alike.
            v = (2.0 * Draw(f"{name}/v").integers(-12, 12, 1, 1, 6, 4) + 1.0) / 8.0
            dout = Draw(f"{name}/dout").integers(1, 24, 1, 1, 4, 4) / 8.0
            wide = fmt in (FP32, BF16)
            if wide:  # half of the size in q, half in k
                q, k = q * 10.0 ** (power // 2), k * 10.0 ** (power - power // 2)
            purpose = f"Scores near 1e{power}: O is the value of the winning key."
            flags = ("HugeLogits",) if power < 38 else ("HugeLogits", "BeyondFloat32")
            notes = (
                ()
                if power < 37
                else ("NaN or inf is legal where a score, or a sum on its way, passes 3.4e38.",)
            )
            scale = 1.0 if wide else 10.0**power
            yield entry(name, fmt, (q, k, v), purpose, *flags, dout=dout, notes=notes, scale=scale)


@group("ties", "largest scores that are equal")
def ties() -> Iterator[Entry]:
    for fmt in FORMATS:
        name = f"ties.{fmt}.all"
        q, k, v = normals(name, Sizes(3, 8, 4))
        yield entry(name, fmt, (q, k[:, :, :1].expand_as(k), v), "All keys are equal: O is the mean.", "Ties")
        name = f"ties.{fmt}.pairs"
        q, k, v = normals(name, Sizes(4, 8, 4))
        k[:, :, 1::2] = k[:, :, ::2]
        yield entry(name, fmt, (q, k, v), "Every key comes twice.", "Ties")
        name = f"ties.{fmt}.zero"
        q, k, v = normals(name, Sizes(3, 5, 4))
        yield entry(name, fmt, (q * 0.0, k, v), "All scores are 0: P is 1/5, which no format holds.", "Ties")
        name = f"ties.{fmt}.large"
        q, k, v = normals(name, Sizes(3, 6, 4))
        q = 1.0 + q.abs().round()
        k = torch.cat([k[:, :, :4].clamp(max=0.5), (3.0 + 0.0 * k[:, :, 4:])], 2)
        yield entry(name, fmt, (q, k, v), "The last two keys tie far above the rest.", "Ties", scale=16.0)


def _rows(*values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[None, None]


@group("near_ties", "scores that differ by far less than their size: float64 picks the wrong winner")
def near_ties() -> Iterator[Entry]:
    values = _rows((0.0, 1.0), (1.0, -1.0))
    flags = ("NearTies", "BeyondFloat64", "HugeLogits")
    notes = (
        "With fp32 accumulation any mixture of the two values is within reach; the bounds say so.",
        "Worth most to references: float64 gives p = 1/2.",
    )
    big, square = 2.0**60, 2.0**50
    for fmt in (FP32, BF16):
        q, k = _rows((1.0, 1.0, 1.0)), _rows((big, 1.0, -big), (big, 2.0, -big))
        purpose = "Products of 2^60 cancel and leave 1 and 2: p = .2689, .7311."
        yield entry(
            f"near_ties.{fmt}.cancelling", fmt, (q, k, values), purpose, *flags, notes=notes, scale=1.0
        )
        q, k = _rows((square, 1.0)), _rows((square, 0.5), (square, 1.0))
        purpose = "Scores of 1.3e30 with a gap of .5: p = .3775, .6225."
        yield entry(f"near_ties.{fmt}.1e30", fmt, (q, k, values), purpose, *flags, notes=notes, scale=1.0)
        half = 2.0**28
        q, k = _rows((half, 1.0)), _rows((half / 2, 1.0), (half / 2, 2.0))
        purpose = "Scores of 2^55 with a gap of 1: p = .2689, .7311."
        yield entry(f"near_ties.{fmt}.2^55", fmt, (q, k, values), purpose, *flags, notes=notes, scale=1.0)
    for fmt, top, low in ((FP16, 2.0**15, 2.0**-15), (E5M2, 2.0**15, 2.0**-14)):
        q, k = _rows((top, low)), _rows((top / 2, low), (top / 2, 2.0 * low))
        purpose = "Scores of 2^29 / low^2 with a gap of 1: the dot product alone needs 60 bits."
        yield entry(
            f"near_ties.{fmt}.wide", fmt, (q, k, values), purpose, *flags, notes=notes, scale=1.0 / low / low
        )
    for fmt in FORMATS:
        if fmt is not E4M3:  # it spans too few binades
            low = 2.0**-16
            q, k = _rows((224.0, low)), _rows((224.0, low), (224.0, 2.0 * low))
            purpose = "Products are exact in float64; multiplying by scale rounds scores of 2e14 to 2^-5."
            scale = 2e14 / (224.0 * 224.0) / 1.0000001
            yield entry(
                f"near_ties.{fmt}.scale", fmt, (q, k, values), purpose, *flags, notes=notes, scale=scale
            )
        for power in (60, 90):
            name = f"near_ties.{fmt}.bias2^{power}"
            q, k, v = normals(name, Sizes(2, 4, 4))
            bias = torch.full((1, 1, 1, 4), 2.0**power, dtype=torch.float64)
            purpose = (
                f"A bias of 2^{power} on every key cancels in the softmax; sums with it lose the scores."
            )
            yield entry(name, fmt, (q, k, v), purpose, *flags, notes=notes, bias=bias)


@group("profiles", "scores that rise or fall along the keys")
def profiles() -> Iterator[Entry]:
    for fmt in FORMATS:
        for label, sign in (("rising", 1.0), ("falling", -1.0)):
            for n in (17, 33):
                name = f"profiles.{fmt}.{label}-{n}"
                draw = Draw(name)
                sizes = Sizes(2, n, 4)
                steps = torch.arange(n, dtype=torch.float64).view(1, 1, n, 1)
                k = sign * torch.cat([steps, draw.normal(1, 1, n, 3)], -1)
                q = torch.cat([torch.ones(1, 1, 2, 1).double(), draw.normal(1, 1, 2, 3)], -1)
                purpose = (
                    "The maximum moves with every tile." if sign > 0 else "The first key stays the maximum."
                )
                yield entry(name, fmt, (q, k, draw.normal(*sizes.v)), purpose, "Profile", scale=0.5)
                name = f"profiles.{fmt}.{label}-steep-{n}"
                k = sign * torch.cat([steps, draw.normal(1, 1, n, 3)], -1)
                yield entry(
                    name, fmt, (q, k, draw.normal(*sizes.v)), purpose, "Profile", "HugeLogits", scale=20.0
                )
