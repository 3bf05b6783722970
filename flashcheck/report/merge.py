"""Certificates of one kernel's dtypes become one, and back."""

from __future__ import annotations

from collections.abc import Sequence

from flashcheck.report.certificate import Certificate


def verdict_of(certificate: Certificate) -> str:
    """The verdict that a certificate's content gives."""
    if certificate.judge_faults:
        return "judge failed"
    if certificate.findings:
        return "rejected"
    if certificate.coverage.missing or certificate.run.stopped or not certificate.run.judged:
        return "incomplete"
    return "certified"


def of_one_dtype(certificate: Certificate, dtype: str) -> Certificate:
    """What a run of ``dtype`` alone says about that dtype: that others were not run is left out."""
    missing = {d: labels for d, labels in certificate.coverage.missing.items() if d == dtype}
    coverage = certificate.coverage.model_copy(update={"missing": missing})
    narrowed = certificate.model_copy(update={"coverage": coverage})
    return narrowed.model_copy(update={"verdict": verdict_of(narrowed)})


def merged(parts: Sequence[Certificate]) -> Certificate:
    """One certificate for several dtypes of a kernel, judged with the same options; at least one part."""
    first = parts[0]
    run = first.run.model_copy(
        update={
            "dtypes": [d for p in parts for d in p.run.dtypes],
            "planned": sum(p.run.planned for p in parts),
            "judged": sum(p.run.judged for p in parts),
            "seconds": round(sum(p.run.seconds for p in parts), 3),
            "durations": {d: s for p in parts for d, s in p.run.durations.items()},
            "started": min(p.run.started for p in parts),
            "stopped": "; ".join(dict.fromkeys(p.run.stopped for p in parts if p.run.stopped)),
            "command": _command([p.run.command for p in parts]),
        }
    )
    missing = {d: labels for p in parts for d, labels in p.coverage.missing.items()}
    counts = {
        "missing": missing,
        "pairs": {d: n for p in parts for d, n in p.coverage.pairs.items()},
        "triples": {d: n for p in parts for d, n in p.coverage.triples.items()},
    }
    whole = first.model_copy(
        update={
            "run": run,
            "tensors": [t for p in parts for t in p.tensors],
            "checks": [c for p in parts for c in p.checks],
            "findings": [f for p in parts for f in p.findings],
            "slack": [s for p in parts for s in p.slack],
            "oracle": [x for p in parts for x in p.oracle],
            "tilings": {d: text for p in parts for d, text in p.tilings.items()},
            "pictures": [x for p in parts for x in p.pictures],
            "problems": {key: spec for p in parts for key, spec in p.problems.items()},
            "coverage": first.coverage.model_copy(update=counts),
            "judge_faults": list(dict.fromkeys(x for p in parts for x in p.judge_faults)),
        }
    )
    return whole.model_copy(update={"verdict": verdict_of(whole)})


def _command(commands: Sequence[str]) -> str:
    """The common words; ``--dtype`` once per part."""
    words = [c.split() for c in commands]
    dtypes = [w[n + 1] for w in words for n, word in enumerate(w[:-1]) if word == "--dtype"]
    first = words[0]
    if "--dtype" not in first:
        return commands[0]
    place = first.index("--dtype")
    rest = first[place + 2 :]
    return " ".join([*first[:place], *(x for d in dtypes for x in ("--dtype", d)), *rest])
