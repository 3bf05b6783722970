"""Acceptance rules as formulas. Each function says whether one tensor is accepted.

Own words from the suites' sources; a rule sees the kernel's tensor, the exact one and eager attention in the
kernel's dtype (``references``). A tensor that a suite does not compare is not in its ``compares``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FORWARD, GRADIENTS = ("O",), ("dQ", "dK", "dV")
EVERYTHING = ("O", "LSE", *GRADIENTS)

Accepts = Callable[[str, Tensor, Tensor, Tensor, torch.dtype], bool]
"""(tensor's name, got, exact, eager in dtype, dtype) -> accepted; tensors in float64."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One suite's rule.

    Attributes:
        name: project and file. formula: the rule in a line.
        inputs: the distribution that the suite draws (``inputs.DISTRIBUTIONS``).
        compares: the tensors that it looks at. dtype: in which it is given its own inputs.
    """

    name: str
    formula: str
    inputs: str
    compares: tuple[str, ...]
    accepts: Accepts
    dtype: torch.dtype = torch.bfloat16


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _close(got: Tensor, exact: Tensor, atol: float, rtol: float) -> bool:
    return bool(torch.isclose(got, exact, atol=atol, rtol=rtol, equal_nan=True).all())


def _stored(exact: Tensor, dtype: torch.dtype) -> Tensor:
    return exact.to(dtype).double()


def _multiple(factor: dict[str, float], floor: float = 0.0, *, jiggle: bool = False) -> Accepts:
    """max|got - ref| <= factor max|eager - ref| + floor, ref rounded into the dtype."""

    def accepts(name: str, got: Tensor, exact: Tensor, eager: Tensor, dtype: torch.dtype) -> bool:
        ref = _stored(exact, dtype)
        allowed = factor[name] * _largest(eager - ref) + floor
        if jiggle:
            moved = ((ref.to(dtype) + 0.3) - 0.3).double()
            allowed += 2 * _largest(moved - ref)
        return _largest(got - ref) <= allowed

    return accepts


def _same_factor(forward: float, backward: float) -> dict[str, float]:
    return {"O": forward, **dict.fromkeys(GRADIENTS, backward)}


def _fixed(tolerances: dict[str, tuple[float, float]]) -> Accepts:
    """|got - ref| <= atol + rtol |ref|, (atol, rtol) by tensor."""

    def accepts(name: str, got: Tensor, exact: Tensor, eager: Tensor, dtype: torch.dtype) -> bool:
        del eager, dtype
        return _close(got, exact, *tolerances[name])

    return accepts


def _tolerances(
    forward: tuple[float, float], backward: tuple[float, float] | None, lse: tuple[float, float] | None
) -> dict[str, tuple[float, float]]:
    out = {"O": forward}
    if lse is not None:
        out["LSE"] = lse
    if backward is not None:
        out |= dict.fromkeys(GRADIENTS, backward)
    return out


def _torch_current(name: str, got: Tensor, exact: Tensor, eager: Tensor, dtype: torch.dtype) -> bool:
    """The low-precision twin of the current helper is fp32 math, rounded at the end."""
    del eager
    factor = {"O": 4.0, "dQ": 180.0, "dK": 16.0, "dV": 4.0}[name]
    return _largest(got - exact) <= max(1e-5, factor * _largest(_stored(exact, dtype) - exact))


def _mean(name: str, got: Tensor, exact: Tensor, eager: Tensor, dtype: torch.dtype) -> bool:
    del name, dtype
    return float((got - exact).abs().mean()) <= 1.1 * float((eager - exact).abs().mean())


def _root_mean_square(limit: float) -> Accepts:
    def accepts(name: str, got: Tensor, exact: Tensor, eager: Tensor, dtype: torch.dtype) -> bool:
        del name, eager, dtype
        error, size = (got - exact).square().mean().sqrt(), exact.square().mean().sqrt()
        return bool(error <= limit * (size + 1e-8)) or _largest(got - exact) <= 1e-6

    return accepts


def _range(name: str, got: Tensor, exact: Tensor, eager: Tensor, dtype: torch.dtype) -> bool:
    """RMSE < 0.11 (max - min): the fp8 rule."""
    del name, eager, dtype
    spread = max(float(got.max()), float(exact.max())) - min(float(got.min()), float(exact.min()))
    return bool((got - exact).square().mean().sqrt() < 0.11 * spread)


def _cosine(limit: float) -> Accepts:
    def accepts(name: str, got: Tensor, exact: Tensor, eager: Tensor, dtype: torch.dtype) -> bool:
        del name, eager, dtype
        norm = got.square().sum() + exact.square().sum()
        return bool(1 - 2 * (got * exact).sum() / norm.clamp(min=1e-12) <= limit)

    return accepts


_LSE = (1e-3, 1e-3)
RULES: tuple[Rule, ...] = (
    Rule(
        "flash-attention 2",
        "max <= 2x (gradients 3x) eager's max",
        "normal",
        (*FORWARD, *GRADIENTS),
        _multiple(_same_factor(2, 3), 1e-5),
    ),
    Rule(
        "flash-attention 3/4",
        "max <= 2x eager's max + 2 jiggle",
        "normal",
        (*FORWARD, *GRADIENTS),
        _multiple(_same_factor(2, 2), jiggle=True),
    ),
    Rule(
        "flash-attention CK, aiter",
        "max <= 2x (gradients 10x) eager's max, 0.01 at least",
        "normal",
        (*FORWARD, *GRADIENTS),
        _multiple(_same_factor(2, 10), 1e-2),
    ),
    Rule(
        "PyTorch SDPA",
        "max <= 4x (dQ 180x, dK 16x) rounded fp32's max",
        "uniform",
        (*FORWARD, *GRADIENTS),
        _torch_current,
    ),
    Rule("PyTorch flex", "mean <= 1.1x eager's mean", "normal", (*FORWARD, *GRADIENTS), _mean),
    Rule(
        "xformers",
        "bf16 2e-2 + 5e-3|x|, gradients 0.9 + 0.1|x|, LSE 2e-4",
        "normal x 3",
        EVERYTHING,
        _fixed(_tolerances((2e-2, 5e-3), (0.9, 0.1), (2e-4, 1e-5))),
    ),
    Rule(
        "TransformerEngine",
        "1.5e-2 + 1.5e-2|x|",
        "normal x 0.1",
        (*FORWARD, *GRADIENTS),
        _fixed(_tolerances((1.5e-2, 1.5e-2), (1.5e-2, 1.5e-2), None)),
    ),
    Rule("TransformerEngine fp8", "rmse < 0.11 range", "normal", (*FORWARD, *GRADIENTS), _range),
    Rule(
        "cudnn-frontend",
        "2e-2 + 2e-2|x|",
        "sparse integers",
        EVERYTHING,
        _fixed(_tolerances((2e-2, 2e-2), (2e-2, 2e-2), (2e-2, 2e-2))),
    ),
    Rule(
        "FlashInfer",
        "bf16 1e-2 + 1e-2|x|, LSE 1e-3",
        "normal",
        ("O", "LSE"),
        _fixed(_tolerances((1e-2, 1e-2), None, _LSE)),
    ),
    Rule("vLLM", "1.5e-2 + 1e-2|x|", "normal", FORWARD, _fixed(_tolerances((1.5e-2, 1e-2), None, None))),
    Rule("KernelBench", "1e-2 + 1e-2|x|", "uniform", FORWARD, _fixed(_tolerances((1e-2, 1e-2), None, None))),
    Rule("FLA", "rms ratio < 0.005", "normal", (*FORWARD, *GRADIENTS), _root_mean_square(0.005)),
    Rule(
        "Triton tutorial",
        "1e-2",
        "normal",
        (*FORWARD, *GRADIENTS),
        _fixed(_tolerances((1e-2, 0.0), (1e-2, 0.0), None)),
        torch.float16,
    ),
    Rule("cosine similarity", "1 - cos <= 7e-6", "normal", (*FORWARD, *GRADIENTS), _cosine(7e-6)),
)
"""In the order of the README's table."""
