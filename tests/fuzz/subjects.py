"""Kernels for the fuzz tests: each wrong, or deadly, in one way that only some problems show."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import replace
from functools import partial

from flashcheck.kernel import ForwardResult
from flashcheck.problem import Problem
from tests.checks.subjects import attend, kernel

SMALL = {"dtypes": ("bf16",), "head_dim": (8, 32)}

honest = kernel(attend, **SMALL)
wrong_scale = kernel(partial(attend, scale_factor=1.1), **SMALL)


def two_bugs(problem: Problem) -> ForwardResult:
    """Off by one under causality, LSE in base 2 without: two groups, never both in one problem."""
    if problem.causal is not None:
        return attend(problem, shift=1)
    return attend(problem, lse_factor=1.4426950408889634)


def two_bugs_at_once(problem: Problem) -> ForwardResult:
    """Off by one under causality; and wherever values are subnormal, O is far too large to be one."""
    result = attend(problem, shift=1) if problem.causal is not None else attend(problem)
    if float(problem.v.abs().max()) > 1e-30:
        return result
    return replace(result, out=result.out * 2.0**40)


def _deadly(problem: Problem) -> bool:
    return problem.num_queries > 20


def segfaults(problem: Problem) -> ForwardResult:
    if _deadly(problem):
        ctypes.string_at(8)
    return attend(problem)


def exits(problem: Problem) -> ForwardResult:
    if _deadly(problem):
        os._exit(3)
    return attend(problem)


def hangs(problem: Problem) -> ForwardResult:
    if _deadly(problem):
        time.sleep(60)
    return attend(problem)


two = kernel(two_bugs, **SMALL)
two_at_once = kernel(two_bugs_at_once, **SMALL)
segfault = kernel(segfaults, **SMALL)
plain_segfault = kernel(segfaults, dtypes=("bf16",), head_dim=(8, 8), options=(), causal=(), gqa=False)
"""With little to draw and to reduce: for what happens around the crash."""
exit_ = kernel(exits, **SMALL)
hang = kernel(hangs, **SMALL)


def signature(problem: Problem) -> str:
    """As a kernel that is compiled for its head dims, options and alignment would declare it."""
    options = [name for name in problem.options() if name != "scale"]
    return f"{problem.head_dim} {problem.value_dim} {problem.group} {problem.causal} {options}"


compiled = replace(kernel(attend, dtypes=("bf16",), head_dim=(8, 32)), signature=signature)
