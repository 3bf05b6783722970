"""Kernels that the command-line tests name; quick to judge."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from functools import partial

import torch

from flashcheck.kernel import ForwardResult
from flashcheck.problem import Problem
from tests.checks.subjects import attend, kernel

SMALL = {"dtypes": ("bf16",), "head_dim": (8, 32)}

honest = kernel(attend, **SMALL)
two_dtypes = kernel(attend, dtypes=("bf16", "fp32"), head_dim=(8, 32))
three_dtypes = kernel(attend, dtypes=("fp16", "bf16", "fp32"), head_dim=(8, 32))
wrong_lse = kernel(partial(attend, lse_factor=1.4426950408889634), **SMALL)
nan = kernel(lambda problem: ForwardResult(attend(problem).out * torch.nan, attend(problem).lse), **SMALL)


def _red_self_test() -> list[str]:
    return ["bf16 products are wrong on this platform"]


object.__setattr__(red := kernel(attend, **SMALL), "self_test", _red_self_test)


def _interrupts() -> None:
    calls = iter(range(1000))

    def forward(problem: Problem) -> ForwardResult:
        if next(calls) == 5:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignored"
            os.kill(os.getpid(), signal.SIGINT)
        return attend(problem)

    globals()["interrupted"] = kernel(forward, **SMALL)


_interrupts()


def refusing(problem: Problem) -> ForwardResult:
    if problem.causal is not None:
        raise NotImplementedError("no causal masks yet")
    return attend(problem)


refuses = kernel(refusing, **SMALL)


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """What a user has who never heard of this project."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


def _noted(problem: Problem) -> ForwardResult:
    """Notes its process and the problem in the folder that NOTES names; takes NAP seconds more."""
    folder = os.environ.get("NOTES")
    if folder:
        with open(f"{folder}/{os.getpid()}", "a", encoding="utf-8") as file:
            file.write(f"{problem.num_queries} {problem.num_keys} {problem.head_dim} {problem.seed}\n")
    time.sleep(float(os.environ.get("NAP", "0")))
    return attend(problem)


def _dies_ahead(problem: Problem) -> ForwardResult:
    """Ends every process but the judge's on longer problems."""
    if multiprocessing.parent_process() is not None and problem.num_queries > 20:
        ctypes.string_at(8)
    return _noted(problem)


def _sleeps_ahead(problem: Problem) -> ForwardResult:
    if multiprocessing.parent_process() is not None:
        time.sleep(50)
    return _noted(problem)


noted = kernel(_noted, **SMALL)
dies_ahead = kernel(_dies_ahead, **SMALL)
sleeps_ahead = kernel(_sleeps_ahead, **SMALL)
