"""Every check on every kernel that ``--flashcheck-kernel`` or ``[tool.flashcheck]`` names."""

from __future__ import annotations

from typing import Any

import flashcheck


@flashcheck.parametrize_with_checks()
def test_kernel(kernel: Any, check: Any) -> None:
    check(kernel)
