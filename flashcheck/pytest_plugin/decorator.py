"""``flashcheck.parametrize_with_checks``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest


def parametrize_with_checks(
    kernels: Sequence[Any] | None = None, *, expected_failed: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """One test per kernel, check and dtype: decorates a test function of ``kernel`` and ``check``.

    Args:
        kernels: names as on the command line (a name is loaded when Triton's interpreter is set up where
            there is no GPU, so prefer it to the object), ``Kernel`` objects, or callables. None: those of
            ``--flashcheck-kernel``, else of ``[tool.flashcheck]`` in pyproject.toml.
        expected_failed: check -> reason; these tests must fail, and one that passes fails the run.

    Example::

        @flashcheck.parametrize_with_checks(["mine.attention:flash"])
        def test_flash(kernel, check):
            check(kernel)
    """
    marks = [pytest.mark.flashcheck_kernels(kernels, expected_failed=expected_failed), pytest.mark.flashcheck]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for mark in marks:
            function = mark(function)
        return function

    return decorate
