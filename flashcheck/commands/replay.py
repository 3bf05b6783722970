"""Judges stored failures again: FAILED, with the same bits or others, FIXED, or ERROR."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flashcheck.commands.fuzz import FOLDER
from flashcheck.commands.fuzz_view import print_finding
from flashcheck.devices import interpret_without_gpu
from flashcheck.errors import ArgumentError
from flashcheck.fuzz.groups import Failure
from flashcheck.fuzz.runner import DEFAULT_LIMIT, KernelLoadError, Runner
from flashcheck.fuzz.store import Finding, read_finding


def run_replay(
    names: tuple[str, ...], on: str | None, device: str | None, keep: bool, stdout: Console
) -> int:
    """1 where a failure is still there, 4 where one could not be judged, else 0."""
    interpret_without_gpu()
    paths = [path for name in names for path in _paths(name)] if names else _all()
    if not paths:
        stdout.print(f"no recorded failures under {FOLDER}", highlight=False)
    worst = 0
    for path in paths:
        worst = max(worst, _replay(path, read_finding(path), on, device, keep, stdout))
    return worst


def _all() -> list[Path]:
    return sorted(FOLDER.glob("*/findings/*.json"))


def _paths(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        return sorted(path.glob("findings/*.json")) or sorted(path.glob("*.json"))
    if path.is_file():
        return [path.with_name(path.stem.removeprefix("test_") + ".json")] if path.suffix == ".py" else [path]
    known = _all()
    found = [p for p in known if p.stem.startswith(name)]
    if not found:
        ids = ", ".join(p.stem for p in known[:8]) or f"none is recorded under {FOLDER}"
        raise ArgumentError("ID or FILE", name, f"a file, a folder or a recorded id: {ids}")
    return found


def _replay(
    path: Path, finding: Finding, on: str | None, device: str | None, keep: bool, stdout: Console
) -> int:
    kernel = on or finding.kernel
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(kernel, device or finding.device, DEFAULT_LIMIT, Path(folder) / "log")
        try:
            report = runner.judge(finding.case, candidates=(finding.group,))
        except KernelLoadError as error:
            raise ArgumentError("KERNEL", kernel, f"a kernel that can be loaded ({error})") from None
        finally:
            runner.close()
    verdict, code = _verdict(finding, report.failure, report.judge_fault)
    stdout.print(Text(f"{verdict}  {path}"))
    if code == 1:
        print_finding(stdout, finding, str(path))
    if verdict.startswith("FIXED") and not keep and on is None:
        for old in (path, path.with_name(f"test_{path.stem}.py")):
            old.unlink(missing_ok=True)
    return code


def _verdict(finding: Finding, failure: Failure | None, judge_fault: str) -> tuple[str, int]:
    if judge_fault:
        return f"ERROR ({judge_fault})", 4
    if failure is None:
        return "FIXED", 0
    if not finding.group.holds(failure):
        return f"FAILED (another failure: {failure.check}: {failure.message})", 1
    same = failure.digest == finding.failure.digest
    return "FAILED (the same, bit for bit)" if same else "FAILED (the same check, other bits)", 1
