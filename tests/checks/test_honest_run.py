"""A run over honest kernels that is stopped and taken up again is the run that was never stopped."""

from __future__ import annotations

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


def test_the_case_in_flight_when_stopped_is_judged_again_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole.json")
    whole.go(3)
    rotate, turns = honest.Run._rotate, iter([False, True])

    def stopped(self: honest.Run, *arguments: object) -> None:
        if next(turns):
            raise KeyboardInterrupt
        rotate(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(honest.Run, "_rotate", stopped)
        run(tmp_path / "parts.json").go(3)
    rest = run(tmp_path / "parts.json")
    assert rest.done == rest.sources[KERNEL].cases == 1
    rest.go(3)
    assert counted(rest) == counted(whole)
