"""Processes share a machine: as many as it has room for, one thread each."""

from __future__ import annotations

import os

import pytest

from flashcheck.fuzz import share
from flashcheck.fuzz.judge import _Spent


@pytest.mark.parametrize(
    ("device", "cores", "gpus", "gib", "workers", "helpers"),
    [
        ("cuda", 16, 1, 139.0, 12, 4),
        ("cuda:0", 16, 8, 139.0, 12, 4),
        ("cuda", 16, 1, None, 12, 4),
        ("cuda", 16, 1, 5.0, 2, 4),
        ("cuda", 16, 1, 0.5, 1, 4),
        ("cuda", 2, 1, 139.0, 1, 1),
        ("cuda", 128, 8, 139.0, 96, 4),
        ("cpu", 2, 0, None, 2, 0),
        ("cpu", 64, 0, None, 8, 0),
    ],
)
def test_workers_by_default(
    device: str,
    cores: int,
    gpus: int,
    gib: float | None,
    workers: int,
    helpers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(share, "cores", lambda: cores)
    monkeypatch.setattr(share, "gpus", lambda: gpus)
    monkeypatch.setattr(share, "free_gib", lambda: gib)
    assert share.default_workers(device) == workers
    assert share.default_helpers(device) == helpers


def test_free_memory_is_that_of_the_fullest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "_SMI", ("printf", "143156\\n2048\\n"))
    assert share.free_gib() == 2.0
    monkeypatch.setattr(share, "_SMI", ("printf", "[N/A]\\n"))
    assert share.free_gib() is None
    monkeypatch.setattr(share, "_SMI", ("no-such-tool",))
    assert share.free_gib() is None


def test_one_thread_each_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    share.one_thread_each()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_a_call_too_slow_for_anything_else_was_compiling() -> None:
    ticks = iter((0.0, 2.0, 10.0, 10.5, 20.0, 25.0, 30.0, 30.25))
    spent = _Spent(lambda: next(ticks), 1.0)
    for _ in range(4):
        spent.around(lambda: None)()
    assert (spent.compiling, spent.first, spent.further) == (7.0, 0.0, 0.75)
