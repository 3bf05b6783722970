"""A run over honest kernels that is stopped and taken up again is the run that was never stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.checks import honest

KERNEL, SEED = "emulator.flash.bf16", 5


def run(path: Path) -> honest.Run:
    kernels, _ = honest.subjects((KERNEL,))
    return honest.Run(kernels, {KERNEL: 1}, SEED, path)


def counted(one: honest.Run) -> tuple[object, ...]:
    source = one.sources[KERNEL]
    return one.done, source.cases, source.checks, source.families, source.groups


def interrupted_on_case_1(path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> honest.Run:
    rotate = honest.Run._rotate

    def pressed(self: honest.Run, number: int, *rest: object) -> None:
        for _ in range(times if number == 1 else 0):
            os.kill(os.getpid(), signal.SIGINT)
        rotate(self, number, *rest)

    one = run(path)
    with monkeypatch.context() as patch:
        patch.setattr(honest.Run, "_rotate", pressed)
        one.go(3)
    return one


def test_the_case_in_flight_when_stopped_is_ended_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole.json")
    whole.go(3)
    stopped = interrupted_on_case_1(tmp_path / "parts.json", monkeypatch, 1)
    assert stopped.done == 2
    rest = run(tmp_path / "parts.json")
    assert counted(rest) == counted(stopped)
    rest.go(3)
    assert counted(rest) == counted(whole)


def test_the_second_interrupt_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted_on_case_1(tmp_path / "parts.json", monkeypatch, 2)
    assert signal.getsignal(signal.SIGINT) is before
