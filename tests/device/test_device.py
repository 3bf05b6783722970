"""The runner of long jobs: limits, order, what is kept; the jobs name kernels and dtypes that exist; shards
add up."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from flashcheck import cli
from flashcheck.fuzz import measure
from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.groups import Failure, Group
from flashcheck.fuzz.store import Finding
from flashcheck.fuzz.time_to_failure import summary_of
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.loading import load
from flashcheck.mutants import MUTANTS
from flashcheck.report.certificate import read
from tests.device import jobs, merge
from tests.device.found import verdict
from tests.device.jobs import ALL_DTYPES, DTYPES, KINDS, Job, Plan, jobs_of
from tests.device.run import Runner

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "golden"


def _job(name: str, code: str, limit: float = 60.0, **more: object) -> Job:
    return Job(name, ("-c", code), limit, **more)  # type: ignore[arg-type]


def _runner(tmp_path: Path, jobs: list[Job], **more: object) -> Runner:
    settings: dict[str, object] = {"slots": 2, "seconds": 60.0, "say": lambda _line: None} | more
    archive, cache = tmp_path / "a.tgz", tmp_path / "cache"
    return Runner(jobs, tmp_path / "run", archive, cache, **settings)  # type: ignore[arg-type]


def test_jobs_run_side_by_side_in_their_order_and_all_is_packed(tmp_path: Path) -> None:
    nap = "import time; print('began'); time.sleep(1.0); open(r'{out}.json', 'w').write('{}')"
    jobs = [_job("a/1", nap), _job("a/2", nap), _job("b/1", "raise SystemExit(3)", after=("a/1", "a/9"))]
    outcomes = _runner(tmp_path, jobs, verdict=verdict).go()
    assert [o.ended for o in outcomes.values()] == ["done"] * 3
    assert [o.code for o in outcomes.values()] == [0, 0, 3]
    assert outcomes["a/1"].verdict == "began"
    for name in ("a/1.json", "a/1.log", "a/2.json", "b/1.log", "summary.json"):
        assert _holds(tmp_path / "a.tgz", name), name
    said = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert said["b/1"]["code"] == 3


def test_an_endless_job_starts_when_nothing_before_it_waits(tmp_path: Path) -> None:
    stamp = "import time; time.sleep(0.5); print(time.monotonic())"
    first, last = _job("a/1", stamp), _job("c/1", stamp, endless=True)
    jobs = [first, _job("b/1", stamp, after=("a/1",)), last, _job("d/1", stamp)]
    outcomes = _runner(tmp_path, jobs, verdict=verdict, slots=3).go()
    ended = {name: float(outcome.verdict) for name, outcome in outcomes.items()}
    assert ended["d/1"] < ended["b/1"], "an ordinary job overtakes one that waits for another"
    assert ended["c/1"] > ended["a/1"] + 0.5


def test_a_job_past_its_limit_is_interrupted_and_keeps_what_it_writes_then(tmp_path: Path) -> None:
    code = (
        "import time\ntry:\n time.sleep(60)\n"
        "except KeyboardInterrupt:\n open(r'{out}.json', 'w').write('[1]')\n"
    )
    outcomes = _runner(tmp_path, [_job("a/1", code, limit=1.0)]).go()
    assert outcomes["a/1"].ended == "interrupted"
    assert json.loads((tmp_path / "run" / "a" / "1.json").read_text()) == [1]


def test_the_run_ends_in_time_whatever_jobs_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ignores the interrupt is killed with all that it started; one that had no turn is said so."""
    monkeypatch.setattr("tests.device.run.GRACE", 1.0)
    child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    deaf = child.replace("time.sleep(60)", "")
    code = f"import subprocess, sys\n{deaf}\nsubprocess.run([sys.executable, '-c', {child!r}])"
    jobs = [_job("a/1", code, slots=2), _job("a/2", "print(1)")]
    started = time.monotonic()
    outcomes = _runner(tmp_path, jobs, seconds=4.0).go()
    assert time.monotonic() - started < 10.0
    assert [o.ended for o in outcomes.values()] == ["killed", "not started"]
    assert (tmp_path / "a.tgz").is_file()


def test_a_killed_run_leaves_what_was_finished(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path\nfrom tests.device import run\nfrom tests.device.jobs import Job\n"
        "run._ARCHIVE_EVERY = 0.3\n"
        "nap = ('-c', 'import time; time.sleep(5)')\n"
        "jobs = [Job('a/1', ('-c', 'print(7)'), 60.0), Job('a/2', nap, 60.0)]\n"
        f"home = Path({str(tmp_path)!r})\n"
        "run.Runner(jobs, home / 'run', home / 'a.tgz', home / 'cache', 2, 60.0).go()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while time.monotonic() < until and not _holds(tmp_path / "a.tgz", "a/1.log"):
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert _holds(tmp_path / "a.tgz", "a/1.log")


def _holds(archive: Path, name: str) -> bool:
    if not archive.is_file():
        return False
    with tarfile.open(archive) as tar:
        return name in tar.getnames()


def test_a_large_archive_is_cut_into_pieces_that_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.device.run.PIECE", 500)
    outcomes = _runner(tmp_path, [_job("a/1", "import random; print(random.randbytes(2000).hex())")]).go()
    assert outcomes["a/1"].code == 0
    pieces = sorted(tmp_path.glob("a.tgz.*"))
    assert len(pieces) > 2
    (tmp_path / "whole.tgz").write_bytes(b"".join(p.read_bytes() for p in pieces))
    assert _holds(tmp_path / "whole.tgz", "a/1.log")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_jobs_have_names_of_their_own_and_wait_only_for_jobs_that_exist(device: str) -> None:
    jobs = jobs_of(list(KINDS), Plan(device))
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    for job in jobs:
        assert set(job.after) <= set(names)
        assert job.arguments[0] == "-m" or Path(job.arguments[0]).is_file()


def test_the_kernels_are_there_with_the_dtypes_that_jobs_name() -> None:
    for name in Plan("cuda").kernels:
        kernel = load(name)
        assert DTYPES.get(name, ALL_DTYPES) == kernel.capabilities.dtypes, name


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax, an extra")
def test_kernels_of_packages_are_run_where_the_packages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in jobs.PACKAGES if name.startswith("jax.")]
    for name in names:
        assert DTYPES.get(name, ALL_DTYPES) == load(name).capabilities.dtypes, name
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: module if module == "jax_plugins" else None
    )
    there = jobs_of(["certificate", "edges"], Plan("cuda"))
    for name in names:
        mine = [job for job in there if name in job.arguments]
        assert len(mine) == 1 + len(DTYPES.get(name, ALL_DTYPES))
        assert {job.environment["JAX_PLATFORMS"] for job in mine} == {"cuda,cpu"}
    assert not any("flash_attn.4" in job.arguments or job.on_cpu for job in there)
    assert not set(names) & set(Plan("cpu").kernels)


def test_what_jobs_ask_for_can_be_asked_for() -> None:
    """An argument that does not exist is found here, not on a machine that is lent."""
    command: Any = typer.main.get_command(cli.app)
    asked = Counter[str]()
    for job in jobs_of(["probe", "certificate", "fuzz", "rate"], Plan("cuda", certify_seconds=300.0)):
        module, *arguments = job.arguments[1:]
        asked[f"{module} {arguments[0]}"] += 1
        if module == "flashcheck.fuzz.measure":
            measure._parser().parse_intermixed_args(arguments)
        else:
            assert module == "flashcheck"
            command.commands[arguments[0]].make_context(arguments[0], arguments[1:])
    for name in ("flashcheck certify", "flashcheck.fuzz.measure campaign", "flashcheck.fuzz.measure rate"):
        assert asked[name] > 0


def test_every_fault_is_in_one_shard() -> None:
    named = [a for job in jobs_of(["mutants"], Plan()) for a in job.arguments if a in MUTANTS]
    assert sorted(named) == sorted(MUTANTS)


@pytest.mark.parametrize("files", [["one.fp16.json", "one.bf16.json"], ["."]], ids=["files", "empty folder"])
def test_certificates_to_merge_come_as_one_folder(files, tmp_path, monkeypatch, capsys) -> None:
    arguments = ["merge", "certificates", *(str(tmp_path / name) for name in files), "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        merge.main()
    assert ended.value.code == 2
    assert "expected one folder of KERNEL.DTYPE.json" in capsys.readouterr().err


def test_certificates_of_dtypes_merge_with_all_they_say() -> None:
    whole = read(GOLDEN / "certificates" / "torch.sdpa.flash.cpu.quick.json")
    parts = []
    for dtype in whole.run.dtypes:
        one = whole.run.model_copy(update={"dtypes": [dtype], "judged": 1})
        pairs = {dtype: {"fp16": (1, 2), "bf16": (2, 3), "fp32": (3, 4)}[dtype]}
        coverage = whole.coverage.model_copy(update={"pairs": pairs, "triples": pairs})
        changed = {"run": one, "coverage": coverage, "tilings": {dtype: "64 keys"}}
        for name in ("tensors", "oracle"):
            changed[name] = [part for part in getattr(whole, name) if part.dtype == dtype]
        parts.append(whole.model_copy(update=changed))
    both = merge._whole(parts[:2])
    assert both.coverage.pairs == both.coverage.triples == {"fp16": (1, 2), "bf16": (2, 3)}
    assert both.tilings == {"fp16": "64 keys", "bf16": "64 keys"}
    assert {part.dtype for part in both.oracle} == {"fp16", "bf16"}
    assert both.verdict == "incomplete"
    assert both.coverage.missing["fp32"] == ["the whole dtype"]
    assert merge._whole(parts[::-1]).verdict == "certified"
    assert merge._whole(parts[::-1]).run.dtypes == ["fp16", "bf16", "fp32"]


def test_honest_runs_add_up_and_the_same_run_twice_does_not() -> None:
    files = sorted((GOLDEN / "false_alarms").glob("*.json"))
    runs = [json.loads(path.read_text()) for path in files]
    whole = merge.honest(runs)
    assert whole["done"] == sum(run["done"] for run in runs)
    assert whole["alarms"] == sum(run["alarms"] for run in runs)
    counted = [source["cases"] for run in runs for source in run["sources"].values()]
    assert sum(source["cases"] for source in whole["sources"].values()) == sum(counted)
    rest = {key: value for key, value in whole.items() if key not in ("sources", "seconds")}
    for n in range(len(runs) + 1):  # a sum of runs is itself one that can be added
        sums = [merge.honest(part) for part in (runs[:n], runs[n:]) if part]
        both = merge.honest(sums)
        assert {key: value for key, value in both.items() if key not in ("sources", "seconds")} == rest
        for name, source in both["sources"].items():
            assert source["checks"] == whole["sources"][name]["checks"]
            assert source["failures"] == whole["sources"][name]["failures"]
    for same in ([runs[0], runs[0]], [whole, runs[0]], [whole, whole]):
        with pytest.raises(SystemExit, match="same seed"):
            merge.honest(same)


def test_shards_of_faults_add_up() -> None:
    def row(name: str, *seconds: float) -> dict[str, object]:
        runs = [{"found": True, "seconds": s, "cases": 1, "tokens": 10 * s, "heads": 2} for s in seconds]
        return {"mutant": name, "found": len(runs), "runs": runs, "seconds": max(seconds), "cases": 1}

    rows = [row(name, place + 1.0, place + 3.0) for place, name in enumerate("abcde")]
    shards = [
        {"what": "mutants", "mutants": rows[n::2], "summary": {"cpu_seconds_allowed": 20.0}} for n in (0, 1)
    ]
    whole = merge.mutants(shards)
    assert [r["mutant"] for r in whole["mutants"]] == list("abcde")
    assert whole["summary"] == summary_of(rows, 20.0)
    assert whole["summary"]["median_cpu_seconds"] == 5.0
    with pytest.raises(SystemExit, match="twice"):
        merge.mutants([shards[0], shards[0]])


def test_campaigns_are_told_by_kernel() -> None:
    spec = ProblemSpec(dtype="bf16", num_queries=3, num_keys=1, window=(0, None), seed=7)
    failure = Failure("forward.bound", "LSE", "LSE is outside its proved bound", where="LSE[0,0,0]: got inf")
    cases = [FuzzCase(one, ("forward.bound",)) for one in (spec, replace(spec, num_queries=80))]
    found = Finding("b", "cuda", Group("forward.bound", ("A",)), failure, *cases, 2, 30, 4.5, (3, 3))
    rows = [{"kernel": name, "findings": [found.to_json()] * (name == "b")} for name in "cab"]
    runs = [{"machine": {"device": "x"}, "campaigns": [json.loads(json.dumps(row))]} for row in rows]
    whole = merge.fuzz(runs)
    assert [(row["kernel"], len(row["findings"])) for row in whole["campaigns"]] == [
        ("a", 0),
        ("b", 1),
        ("c", 0),
    ]
    (told,) = whole["campaigns"][1]["findings"]
    shrunk = {"dtype": "bf16", "num_queries": 3, "num_keys": 1, "window": [0, None], "seed": 7}
    assert told["shrunk"] == shrunk
    assert told["first"] == shrunk | {"num_queries": 80}
    assert (told["check"], told["tensor"], told["reproduces"]) == ("forward.bound", "LSE", [3, 3])
    assert told["is"] == "not settled"


def test_shards_of_the_audit_add_up() -> None:
    recorded = json.loads((GOLDEN / "audit.json").read_text())
    names = [row["mutant"] for row in recorded["mutants"]]
    shards = []
    for n in range(3):
        mine = set(names[n::3])
        kills = {
            plan: [row for row in rows if row["mutant"] in mine]
            for plan, rows in recorded["kills"].items()
            if plan.startswith("mutants")
        }
        rows = [row for row in recorded["mutants"] if row["mutant"] in mine]
        shards.append({"flashcheck": recorded["flashcheck"], "mutants": rows, "kills": kills})
    whole = merge.audit(shards)
    assert [row["mutant"] for row in whole["mutants"]] == names
    for plan, rows in whole["kills"].items():
        assert sorted(r["mutant"] for r in rows) == sorted(r["mutant"] for r in recorded["kills"][plan])


def test_a_lost_gpu_ends_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later case would fail for no fault of its own."""
    from tests import long_run
    from tests.bounds import soundness
    from tests.checks import honest

    kernel = load("tests.fuzz.subjects:honest")
    monkeypatch.setattr(long_run, "device_lost", lambda: True)
    run = soundness.Run({"tests.fuzz.subjects:honest": 1}, 1, None)
    run.go(5)
    assert run.done == 1
    assert len(run.faults) == 1
    count = honest.Run({"k": (kernel, "cpu")}, {"k": 1}, 1, None)
    count.only = ("forward.bound",)
    count.go(5)
    assert count.done == 1
    assert count.alarms == 1
