"""Gradients by automatic differentiation, of the O and LSE that are given and not of the library's own.

A backward is judged on the stored forward that it was given. Libraries that expose no more than a
differentiable function keep their own O and LSE for the backward; ``saved_tensors_hooks`` hands them ours
when they ask for theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Call = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]


def gradients_given(
    call: Call,
    inputs: Mapping[str, Tensor],
    stored: tuple[Tensor, Tensor],
    output_gradients: Sequence[Tensor],
    lse_unit: float = 1.0,
) -> dict[str, Tensor]:
    """Gradients of ``inputs`` by name.

    Args:
        call: the library's forward: takes the inputs by name, returns O and LSE in the library's layout.
        stored: O and LSE to differentiate at, in that layout.
        output_gradients: of O, and of LSE too where that has one.
        lse_unit: what the library divides its LSE by before it keeps it (ln 2: it keeps one in base 2).

    Raises:
        RuntimeError: where the library did not ask for an O or an LSE of its own.
    """
    returned: list[tuple[str, Tensor, Tensor]] = []
    asked: set[str] = set()

    def unpack(saved: Any) -> Any:
        # Tensors without elements all lie at address 0.
        if saved.numel() and any(saved.data_ptr() == x.data_ptr() for x in leaves.values()):
            return saved
        for name, own, given in returned:
            unit = lse_unit if name == "LSE" else 1.0
            if _holds(saved, own, unit):
                asked.add(name)
                return _laid_out(given if unit == 1.0 else (given.double() / unit).float(), saved)
        return saved

    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, unpack):
        results = call(leaves)
        returned += zip(("O", "LSE"), results, stored, strict=True)
        outputs = results[: len(output_gradients)]
        found = torch.autograd.grad(outputs, list(leaves.values()), list(output_gradients))
    if missed := {"O", "LSE"} - asked:
        raise RuntimeError(f"the backward reads no stored {' and '.join(sorted(missed))} of its forward")
    return dict(zip(leaves, found, strict=True))


def _holds(saved: Tensor, own: Tensor, unit: float) -> bool:
    """``saved`` is the result ``own`` or a copy of it; in another unit, a tensor of the same values but for
    their rounding: the library converted them on the way out."""
    if saved.dtype != own.dtype:
        return False
    if unit == 1.0 and saved.data_ptr() == own.data_ptr():
        return True
    if saved.shape != own.shape:
        return False
    if unit == 1.0:
        return torch.equal(saved, own)
    return torch.allclose(saved, own / unit, rtol=1e-5, atol=1e-6, equal_nan=True)


def _laid_out(given: Tensor, saved: Tensor) -> Tensor:
    """``given`` with the shape and strides of ``saved``, which may have a last dimension of one more, or a
    padded one: zeros there."""
    if saved.dim() == given.dim() + 1:
        given = given.unsqueeze(-1)
    result = torch.zeros_like(saved)
    result[..., : given.shape[-1]].copy_(given)
    return result
