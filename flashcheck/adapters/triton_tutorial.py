"""The fused attention of Triton's tutorial (python/tutorials/06-fused-attention.py), where the file is.

The environment variable FLASHCHECK_TRITON_TUTORIAL names the file. Read from triton-lang/triton at 003da478
and, for Triton 3.6, at 5c846f01: scale, log2 e and their product are rounded into fp32 each; masked scores
get -1e6 added instead of -inf, which costs one more rounding; P is rounded into fp16 whatever the inputs are;
tiles are tuned, so they are not declared, and since tuning goes by timing another process may compute other
bits. There is no mask at the ends of tiles, so lengths are multiples of 128, the largest. The LSE is kept for
the backward and not returned. The backward multiplies k by the scale and rounds it into fp16 before the
product, and some releases mask it whether causal or not, so it is not declared. Warps are not specialised, as
in the file's own tests on Hopper. A causal call takes the tiles of an earlier one of its length and head dim
that was not causal, and some of them are wrong for it (golden/findings/019); nothing is done about that here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any

import torch

from flashcheck.adapters.optional import installed
from flashcheck.arithmetic import Arithmetic, flash
from flashcheck.errors import UnusableError
from flashcheck.kernel import Capabilities, ForwardResult, Kernel
from flashcheck.problem import Problem

NAME = "triton.tutorial"
VARIABLE = "FLASHCHECK_TRITON_TUTORIAL"

CAPABILITIES = Capabilities(
    dtypes=("fp16",),
    options=("scale", "causal"),
    head_dim=(64, 128),  # of 16, 32, 64, 128, 256: those that every tuned tile fits
    head_dim_multiple=64,
    length_multiple=128,
    cross_lengths=False,
    any_strides=False,
    isolates_nonfinite=False,
    deterministic=False,
    devices=("cuda",),
    # The running maximum is taken of the products before they are scaled.
    nonpositive_scale=False,
)


def tutorial_kernel() -> Kernel:
    """``triton.tutorial``."""
    path = _path()
    module = _module(path)
    further = _further(module)

    def forward(problem: Problem) -> ForwardResult:
        tensors = (x.contiguous() for x in (problem.q, problem.k, problem.v))
        with torch.no_grad():
            causal, scale = problem.causal is not None, problem.effective_scale
            return ForwardResult(module.attention(*tensors, causal, scale, *further))

    return Kernel(
        name=NAME,
        forward=forward,
        capabilities=CAPABILITIES,
        arithmetic=tutorial_arithmetic,
        source=_source(path),
    )


def tutorial_arithmetic(problem: Problem) -> Arithmetic:
    """What the tutorial's forward does with this problem."""
    return flash(problem.format, scale_roundings=3, score_roundings=1, order="ascending")


def _path() -> Path:
    given = os.environ.get(VARIABLE)
    if given is None:
        raise UnusableError(NAME, f"set {VARIABLE} to the path of Triton's 06-fused-attention.py")
    path = Path(given)
    if not path.is_file():
        raise UnusableError(NAME, f"{VARIABLE} is {given}, where there is no file")
    return path


def _module(path: Path) -> Any:
    """The file, which has an ``attention``; it asks for a GPU, and for pytest, when it is imported."""
    spec = importlib.util.spec_from_file_location("triton_fused_attention_tutorial", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise UnusableError(NAME, f"importing {path} fails: {type(error).__name__}: {line}") from None
    if not hasattr(module, "attention"):
        raise UnusableError(NAME, f"{path} has no attention")
    return module


def _source(path: Path) -> str:
    """Triton's version, which the file does not say, and which file it is."""
    release = installed("triton") or "not installed"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"triton {release} {path.name}, SHA-256 {digest[:16]}"


def _further(module: Any) -> tuple[bool, ...]:
    """Arguments after the scale: no specialised warps, where the release has a say in it."""
    forward = getattr(getattr(module, "_attention", None), "forward", None)
    names = list(inspect.signature(forward).parameters) if forward is not None else []
    return (False,) if names[6:7] == ["warp_specialize"] else ()
