"""Values that break kernels: cancellation, outliers, subnormals, the ends of formats."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashcheck.formats import BF16, E4M3, E5M2, FP16, FP32
from flashcheck.golden.draw import Draw
from flashcheck.golden.entry import FORMATS, Entry, Sizes, entry, group
from flashcheck.golden.themes.ordinary import normals


@group("cancellation", "sums whose terms cancel")
def cancellation() -> Iterator[Entry]:
    for fmt in FORMATS:
        name = f"cancellation.{fmt}.values"
        q, k, v = normals(name, Sizes(3, 8, 4))
        k, v = k.clone(), v.clone()
        k[:, :, 1::2], v[:, :, 1::2] = k[:, :, ::2], -v[:, :, ::2]
        yield entry(
            name, fmt, (q, k, v), "P V is 0 exactly: keys in pairs, values of opposite sign.", "Cancellation"
        )
        name = f"cancellation.{fmt}.products"
        q, k, v = normals(name, Sizes(3, 6, 8))
        k = torch.cat([k[..., :4] * 16.0, -k[..., :4] * 16.0], -1) + k * 0.25
        q = torch.cat([q[..., :4], q[..., :4]], -1)
        yield entry(name, fmt, (q, k, v), "q . k cancels to a small fraction of its terms.", "Cancellation")
        name = f"cancellation.{fmt}.offset"
        q, k, v = normals(name, Sizes(3, 8, 4))
        purpose = "Values near 100: dP - delta cancels in the backward."
        yield entry(name, fmt, (q, k, v * 0.25 + 100.0), purpose, "Cancellation")
        name = f"cancellation.{fmt}.dout"
        q, k, v = normals(name, Sizes(4, 5, 4))
        dout = Draw(f"{name}/dout").normal(1, 1, 1, 4).expand(1, 1, 4, 4).clone()
        dout[:, :, 1::2] *= -1.0
        q = q[:, :, :1].expand_as(q)
        yield entry(name, fmt, (q, k, v), "dK and dV sum to 0 over equal queries.", "Cancellation", dout=dout)


@group("outliers", "a few values are 100 times the others")
def outliers() -> Iterator[Entry]:
    for fmt in FORMATS:
        for tensor in range(3):
            name = f"outliers.{fmt}.{'qkv'[tensor]}"
            values = list(normals(name, Sizes(4, 8, 8)))
            spots = Draw(f"{name}/spots").integers(0, 15, *values[tensor].shape) == 0
            values[tensor] = torch.where(spots, values[tensor] * 100.0, values[tensor])
            q, k, v = values
            yield entry(name, fmt, (q, k, v), "Outliers such as trained networks have.", "Outliers")


@group("subnormals", "operands among the subnormal numbers of the format")
def subnormals() -> Iterator[Entry]:
    for fmt in FORMATS:
        for tensor in range(3):
            name = f"subnormals.{fmt}.{'qkv'[tensor]}"
            values = list(normals(name, Sizes(3, 5, 4)))
            values[tensor] = values[tensor] * (4.0 * fmt.quantum)
            scale = 1.0 if tensor == 2 or fmt in (FP32, BF16) else 2.0 ** -int(fmt.min_exponent)
            purpose = f"Subnormal {'qkv'[tensor]}; the scale brings scores back to 1 where the format allows."
            q, k, v = values
            notes = ("Hardware that flushes subnormal operands to zero must declare it.",)
            yield entry(name, fmt, (q, k, v), purpose, "Subnormal", scale=scale, notes=notes)


@group("format_ends", "values at the largest finite number, and outputs past it")
def format_ends() -> Iterator[Entry]:
    for fmt in FORMATS:
        top = fmt.max_finite if fmt is not FP32 else fmt.max_finite / 2
        top = top if fmt is not BF16 else fmt.max_finite / 2
        name = f"format_ends.{fmt}.v"
        q, k, v = normals(name, Sizes(3, 6, 4))
        signs = torch.where(v > 0, 1.0, -1.0).double()
        wide = "Unnormalised sums may pass the range of fp32: inf or NaN is legal where the bound says so."
        notes = (wide,) if fmt in (FP32, BF16) else ()
        yield entry(
            name, fmt, (q, k, signs * top), "V at the largest values, both signs.", "Saturation", notes=notes
        )
        name = f"format_ends.{fmt}.v-positive"
        q, k, v = normals(name, Sizes(3, 6, 4))
        yield entry(
            name, fmt, (q, k, 0.0 * v + top), "O is the largest value exactly.", "Saturation", notes=notes
        )
        if fmt in (FP16, E4M3, E5M2):
            name = f"format_ends.{fmt}.k"
            q, k, v = normals(name, Sizes(3, 6, 4))
            keys = torch.where(k > 0, 1.0, -1.0).double() * top
            purpose = "K at the largest values; the scale brings scores back to 1."
            yield entry(name, fmt, (q, keys, v), purpose, "Saturation", scale=1.0 / top)
        if fmt is FP16:
            name = f"format_ends.{fmt}.output"
            q, k, v = normals(name, Sizes(3, 4, 4))
            v = v.abs() * 10000.0 + 20000.0
            purpose = "v_descale = 8 takes O past 65504: inf is the rounded answer."
            yield entry(
                name, fmt, (q, k, v), purpose, "Saturation", "OutputOverflow", backward=False, v_descale=8.0
            )
