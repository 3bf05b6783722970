"""What a kernel allocates holds anything at first: poison in fresh memory shows what is never written."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FRESH = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class _Poison(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills every fresh floating allocation with one value; for kernels that nothing compiles."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch shields this class from its compiler and imports that first: seconds a process."""
        return False

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = value
        self.filled = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _FRESH and isinstance(out, Tensor) and out.dtype.is_floating_point and out.numel():
            value = min(self.value, torch.finfo(out.dtype).max)
            # A copy of an expanded tensor is allocated with strides of 0, which may not be written twice.
            out[tuple(slice(0, 1) if step == 0 else slice(None) for step in out.stride())].fill_(value)
            self.filled += 1
        return out


class _PoisonBesideCompiler(_Poison):  # type: ignore[no-untyped-call]
    """The same where torch's compiler is loaded, and must not trace what this does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


def cannot_be_watched(error: Exception) -> bool:
    """torch's higher-order operators (flex_attention is one) and its compiler refuse to run under this mode.

    The compiler remembers that it failed: it is told to forget, or the kernel would fail from now on.
    """
    if not any(word in str(error) for word in ("HigherOrderOperator", "Dynamo", "torch._dynamo")):
        return False
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    return True


@contextmanager
def poisoned_allocations(value: float) -> Iterator[_Poison]:
    """Every tensor that torch allocates uninitialised inside holds ``value``."""
    mode = _PoisonBesideCompiler(value) if "torch._dynamo" in sys.modules else _Poison(value)
    with mode:
        yield mode
