"""Puts the files of shards together.

    python -m tests.device.merge certificates FOLDER/certificate --out golden/field --suffix h200.standard
    python -m tests.device.merge honest FOLDER/honest/*.json --out honest.json
    python -m tests.device.merge mutants FOLDER/mutants/*.json --out mutants.json
    python -m tests.device.merge audit FOLDER/audit/*.json --out audit.json
    python -m tests.device.merge fuzz FOLDER/fuzz/*.json --out fuzz.json

Soundness runs are added up by ``tests.bounds.summary``, edges by ``tests.report.edges --merge``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashcheck.files import write_atomically
from flashcheck.fuzz.time_to_failure import summary_of
from flashcheck.report.certificate import Certificate, read, write
from flashcheck.report.merge import merged, of_one_dtype
from tests.checks.honest import Source


def certificates(folder: Path) -> dict[str, Certificate]:
    """Kernel -> one certificate of the dtypes for which ``KERNEL.DTYPE.json`` lies in the folder."""
    parts: dict[str, list[Certificate]] = {}
    for path in sorted(folder.glob("*.json")):
        one = read(path)
        parts.setdefault(one.kernel.name, []).append(of_one_dtype(one, one.run.dtypes[0]))
    return {name: _whole(found) for name, found in parts.items()}


def _whole(parts: list[Certificate]) -> Certificate:
    """In the declared order of dtypes, with those that no part judged named as missing."""
    declared = [str(d) for d in parts[0].kernel.capabilities["dtypes"]]
    whole = merged(sorted(parts, key=lambda part: declared.index(part.run.dtypes[0])))
    absent = {d: ["the whole dtype"] for d in declared if d not in whole.run.dtypes}
    if not absent:
        return whole
    coverage = whole.coverage.model_copy(update={"missing": whole.coverage.missing | absent})
    verdict = "incomplete" if whole.verdict == "certified" else whole.verdict
    return whole.model_copy(update={"coverage": coverage, "verdict": verdict})


def honest(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Runs of `tests.checks.honest` with different seeds or kernels, and sums of such runs, added up by
    kernel. Verdicts on groups of problems stay those of each run: ``alarms`` counts what each found."""
    drawn = [(seed, kernel) for run in runs for seed in _seeds(run) for kernel in run["sources"]]
    if len(set(drawn)) < len(drawn):
        sys.exit("two of the runs have the same seed and a kernel in common: they may be the same problems")
    sources: dict[str, Source] = {}
    for run in runs:
        for name, data in run["sources"].items():
            one, sum_ = Source.from_json(data), sources.setdefault(name, Source())
            sum_.cases += one.cases
            sum_.seconds += one.seconds
            sum_.alarms += one.alarms
            named = "seeds" in run  # the lines of a sum name their seeds already
            sum_.failures += [line if named else f"seed {run['seed']}, {line}" for line in one.failures]
            for field in ("checks", "times", "families"):
                getattr(sum_, field).update(getattr(one, field))
    rows = {name: source.to_json() for name, source in sorted(sources.items())}
    for row in rows.values():
        del row["groups"]  # sums over one run's problems: they do not add up
    return {
        "made_by": "python -m tests.checks.honest, python -m tests.device.merge",
        "versions": runs[0]["versions"],
        "date": max(run["date"] for run in runs),
        "seeds": sorted({seed for run in runs for seed in _seeds(run)}),
        "done": sum(run["done"] for run in runs),
        "seconds": round(sum(run["seconds"] for run in runs), 1),
        "alarms": sum(run["alarms"] for run in runs),
        "checks": dict(sorted(sum((Counter(run["checks"]) for run in runs), Counter[str]()).items())),
        "sources": rows,
    }


def _seeds(run: dict[str, Any]) -> list[int]:
    """Of a run, or of a sum of runs."""
    return list(run["seeds"]) if "seeds" in run else [run["seed"]]


def mutants(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shards of ``flashcheck.fuzz.measure mutants``, by fault."""
    rows = sorted((row for run in runs for row in run["mutants"]), key=lambda row: str(row["mutant"]))
    allowed = {run["summary"]["cpu_seconds_allowed"] for run in runs if "summary" in run}
    if len(allowed) != 1 or len({row["mutant"] for row in rows}) < len(rows):
        sys.exit("the shards allow different times, or hold the same fault twice")
    unfinished = [row for run in runs for row in run.get("unfinished", ())]
    return {**runs[0], "mutants": rows, "unfinished": unfinished, "summary": summary_of(rows, allowed.pop())}


def audit(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shards of ``flashcheck audit``, in the registry's order; a fault from the first shard that has it."""
    from flashcheck.mutants import MUTANTS

    order = {name: place for place, name in enumerate(MUTANTS)}

    def together(lists: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        rows = {row["mutant"]: row for one in reversed(lists) for row in one}
        return sorted(rows.values(), key=lambda row: order.get(row["mutant"], -1))

    whole: dict[str, Any] = {}
    for run in runs:
        whole |= {key: value for key, value in run.items() if key not in whole}
    for key in ("mutants", "rivals"):
        if any(key in run for run in runs):
            whole[key] = together([run[key] for run in runs if key in run])
    plans = sorted({plan for run in runs for plan in run.get("kills", {})})
    if plans:
        whole["kills"] = {
            plan: together([run["kills"][plan] for run in runs if plan in run.get("kills", {})])
            for plan in plans
        }
    return whole


def fuzz(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Campaigns of one machine, by kernel, as golden/fuzz.json holds them: of a finding what it is about, and
    ``is`` for a person to fill in."""
    rows = sorted((row for run in runs for row in run["campaigns"]), key=lambda row: str(row["kernel"]))
    told = [{**row, "findings": [_told(one) for one in row["findings"]]} for row in rows]
    return {"what": "campaign", "machine": runs[0]["machine"], "campaigns": told}


def _told(found: dict[str, Any]) -> dict[str, Any]:
    failure = found["failure"]
    about = {name: failure[name] for name in ("check", "tensor", "message", "where") if failure[name]}
    problems = {"shrunk": found["case"]["spec"], "first": found["first"]["spec"]}
    counts = {name: found[name] for name in ("cases", "after_cases", "after_seconds", "reproduces")}
    return {"id": found["id"], **about, **problems, **counts, "is": "not settled"}


KINDS = {"fuzz": fuzz, "honest": honest, "mutants": mutants, "audit": audit}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["certificates", *KINDS])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suffix", default="h200.standard", help="of certificates' names")
    given = parser.parse_args()
    if given.kind == "certificates":
        found = certificates(given.files[0])
        if len(given.files) > 1 or not found:
            names = " ".join(map(str, given.files))
            parser.error(f"files = {names}: expected one folder of KERNEL.DTYPE.json")
        given.out.mkdir(parents=True, exist_ok=True)
        for name, certificate in found.items():
            path = given.out / f"{name.replace(':', '-')}.{given.suffix}.json"
            write(certificate, path)
            print(f"{path}: {certificate.verdict}, {', '.join(certificate.run.dtypes)}")
        return
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in given.files]
    write_atomically(given.out, json.dumps(KINDS[given.kind](runs), indent=1) + "\n")


if __name__ == "__main__":
    main()
