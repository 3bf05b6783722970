"""flashcheck: certifies flash-attention kernels against proved elementwise error bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flashcheck.pytest_plugin.decorator import parametrize_with_checks

__all__ = ["__version__", "parametrize_with_checks"]


def __getattr__(name: str) -> Any:
    # pytest is imported by those who ask for it alone.
    if name == "parametrize_with_checks":
        from flashcheck.pytest_plugin.decorator import parametrize_with_checks

        return parametrize_with_checks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
