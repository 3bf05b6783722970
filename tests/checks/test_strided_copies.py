"""Gradients reach a device in the layout they had: torch copies into no tensor that overlaps itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashcheck.checks.unwritten import strided_to

BASE = torch.arange(96.0).reshape(2, 3, 4, 4)
LAYOUTS = {
    "contiguous": BASE,
    "transposed": BASE.transpose(1, 2),
    "sliced": BASE[:, :, ::2, 1:],
    "expanded from one number": torch.ones(()).expand(2, 3, 4, 4),
    "expanded heads": BASE[:, :1].expand(2, 3, 4, 4),
    "expanded columns": BASE[..., :1].expand(2, 3, 4, 4),
    "one of each": BASE[:1, :1, :1, :1],
    "nothing": BASE[:, :, :0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_keep_values_and_strides(layout: str) -> None:
    x: Tensor = LAYOUTS[layout]
    copy = strided_to(x, torch.device("cpu"))
    assert torch.equal(copy, x)
    assert [s for s, n in zip(copy.stride(), x.shape, strict=True) if n > 1] == [
        s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1
    ]
    assert not x.numel() or copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
