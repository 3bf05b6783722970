"""Tensors as integers and hex strings: little-endian words, one after the other, row-major."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashcheck.formats import Format
from flashcheck.golden.rounding import width

_CODES = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def from_patterns(codes: Sequence[int], shape: Sequence[int], fmt: Format) -> Tensor:
    """A tensor of the format's dtype from unsigned codes."""
    bits = width(fmt)
    signed = [c - (1 << bits) if bits > 8 and c >> (bits - 1) else c for c in codes]
    return torch.tensor(signed, dtype=_CODES[bits]).view(fmt.dtype).reshape(tuple(shape))


def to_patterns(x: Tensor, fmt: Format) -> list[int]:
    """The inverse: unsigned codes of a tensor of the format's dtype, row-major."""
    bits = width(fmt)
    codes: list[int] = x.contiguous().view(_CODES[bits]).flatten().tolist()
    return [c & ((1 << bits) - 1) for c in codes]


def to_bytes(codes: Sequence[int], bits: int) -> bytes:
    """Little-endian words."""
    return b"".join(c.to_bytes(bits // 8, "little") for c in codes)


def to_hex(codes: Sequence[int], bits: int) -> str:
    """Little-endian words as lower-case hex."""
    return to_bytes(codes, bits).hex()


def from_hex(text: str, bits: int) -> list[int]:
    """The inverse of ``to_hex``."""
    raw, size = bytes.fromhex(text), bits // 8
    return [int.from_bytes(raw[n : n + size], "little") for n in range(0, len(raw), size)]
