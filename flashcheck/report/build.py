"""Makes a certificate out of an outcome."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import platform
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import flashcheck
from flashcheck.adapters.optional import installed
from flashcheck.bits import bytes_of
from flashcheck.certify import Finding, Outcome, TensorSummary
from flashcheck.checks import Location, Status
from flashcheck.checks.judged import on_device
from flashcheck.detail import Detail, Point
from flashcheck.inputs.coverage import required
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Kernel
from flashcheck.masks import ALIGNMENTS
from flashcheck.plan import Plan
from flashcheck.problem import OPTIONS
from flashcheck.report.certificate import (
    Certificate,
    CheckPart,
    CoveragePart,
    Element,
    FindingPart,
    HistogramPart,
    KernelPart,
    MachinePart,
    OraclePart,
    PointsPart,
    RunPart,
    SlackPart,
    TensorPart,
)
from flashcheck.report.pictures import pictures_of
from flashcheck.report.upgrade import problem_id

MOST_POINTS = 200
"""Per dtype and tensor: a certificate of 5,000 problems stays under a megabyte."""


def certificate_of(
    kernel: Kernel,
    outcome: Outcome,
    device: str,
    command: str,
    started: datetime.datetime,
    load_name: str = "",
    probed: dict[str, Any] | None = None,
) -> Certificate:
    """The certificate of one run of ``kernel`` on ``device``; ``command`` repeats it.

    ``load_name``: by which ``flashcheck.loading.load`` finds the kernel, where it does.
    ``probed``: what a probe of the device found (``probe.gate.Gate.describe``).
    """
    plan = outcome.plan
    problems: dict[str, dict[str, Any]] = {}
    return Certificate(
        verdict=outcome.verdict.value,
        kernel=_kernel_part(kernel, device, load_name),
        machine=MachinePart(
            device=_device_name(device),
            model=_machine(kernel, device),
            platform=platform.platform(),
            processor=platform.processor() or platform.machine(),
            probed=probed,
        ),
        versions=versions(),
        run=RunPart(
            level=plan.level,
            seed=plan.seed,
            dtypes=list(plan.dtypes),
            planned=len(plan.cases),
            judged=outcome.judged,
            seconds=round(outcome.seconds, 3),
            durations={dtype: round(spent, 3) for dtype, spent in outcome.durations.items()},
            started=started.isoformat(timespec="seconds"),
            stopped=outcome.stopped,
            command=command,
        ),
        tensors=[
            _tensor_part(outcome, dtype, name, summary, problems)
            for (dtype, name), summary in sorted(outcome.tensors.items(), key=_order(plan.dtypes))
        ],
        checks=[
            CheckPart(
                dtype=dtype,
                check=name,
                passed=counts[Status.PASS],
                failed=counts[Status.FAIL],
                not_applicable=counts[Status.NOT_APPLICABLE],
            )
            for (dtype, name), counts in outcome.checks.items()
        ],
        findings=[finding_part(f, problems) for f in outcome.findings],
        slack=[
            SlackPart(
                dtype=dtype,
                family=family,
                tensor=tensor,
                median_slack=median,
                problems=len(outcome.slack[dtype, family, tensor]),
            )
            for (dtype, family, tensor), median in outcome.median_slack().items()
        ],
        oracle=[
            OraclePart(
                dtype=dtype,
                family=family,
                direction="forward" if direction == "forward" else "backward",
                fp64=rows["fp64"],
                double_double=rows["double-double"],
                exact=rows["exact"],
                unresolved=rows["unresolved"],
            )
            for (dtype, family, direction), rows in sorted(outcome.rungs.items())
        ],
        coverage=CoveragePart(
            required=list(required(kernel.capabilities)),
            missing={dtype: list(labels) for dtype, labels in outcome.missing.items()},
            undeclared=undeclared(kernel),
            pairs=_combinations(outcome, 2),
            triples=_combinations(outcome, 3),
        ),
        problems=problems,
        pictures=pictures_of(outcome),
        tilings={dtype: tally.describe() for dtype, tally in outcome.tilings.items() if tally.problems},
        judge_faults=outcome.judge_faults,
    )


def _combinations(outcome: Outcome, strength: int) -> dict[str, tuple[int, int]]:
    found = {dtype: counts.get(strength) for dtype, counts in outcome.combinations.items()}
    return {dtype: (c.covered, c.possible) for dtype, c in found.items() if c is not None}


def certificate_of_nothing(kernel: Kernel, device: str) -> Certificate:
    """Kernel, machine and versions as they are here and now, with nothing judged."""
    plan = Plan("none", 0, (), (), {})
    return certificate_of(kernel, Outcome(plan), device, "", datetime.datetime.now(datetime.UTC))


def versions() -> dict[str, str]:
    """flashcheck, torch, triton and Python."""
    return {
        "flashcheck": flashcheck.__version__,
        "torch": torch.__version__,
        "triton": installed("triton") or "not installed",
        "python": platform.python_version(),
    }


def _order(dtypes: tuple[str, ...]) -> Any:
    return lambda item: (dtypes.index(item[0][0]), item[0][1] != "O", item[0][1])


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _machine(kernel: Kernel, device: str) -> dict[str, Any]:
    return kernel.machine(torch.device(device)).describe()


def _kernel_part(kernel: Kernel, device: str, load_name: str) -> KernelPart:
    arithmetic: dict[str, dict[str, Any]] = {}
    low, high = kernel.capabilities.head_dim
    dim = min(max(64, low), high)
    for dtype in kernel.capabilities.dtypes:
        spec = ProblemSpec(dtype=dtype, num_queries=128, num_keys=128, head_dim=dim, value_dim=dim)
        arithmetic[dtype] = kernel.arithmetic(on_device(spec.outline(), torch.device(device))).describe()
    return KernelPart(
        name=kernel.name,
        load_name=load_name,
        source=_shown(kernel.source),
        source_sha256=_hash(kernel.source),
        capabilities=_plain(kernel.capabilities.describe()),
        arithmetic=arithmetic,
        backward=kernel.backward is not None,
    )


def undeclared(kernel: Kernel) -> list[str]:
    """What attention can have and this kernel does not declare."""
    c = kernel.capabilities
    absent = [f"option {name}" for name in OPTIONS if name not in c.options]
    if "causal" in c.options:
        absent += [f"causal={a}" for a in ALIGNMENTS if a not in c.causal]
    features = {
        "backward": kernel.backward is not None,
        "log-sum-exp": c.lse,
        "grouped heads": c.gqa,
        "value dim differs": c.value_dim_differs,
        "rows that see no key": c.empty_rows,
        "Nq != Nk": c.cross_lengths,
        "zero keys": c.zero_length,
        "any strides": c.any_strides,
        "NaN and inf stay in their rows": c.isolates_nonfinite,
        "bitwise repeatable": c.deterministic,
    }
    absent += [name for name, declared in features.items() if not declared]
    return absent + [f"{a} together with {b}" for a, b in c.not_together]


def _shown(source: str) -> str:
    """A file below the working folder by its path from there: a certificate is read on other machines."""
    path = Path(source)
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else source


def _hash(source: str) -> str:
    """Of the Python files of the folder that ``source`` lies in, or of the text where it is no file."""
    path = Path(source)
    digest = hashlib.sha256()
    if not source or not path.is_file():
        digest.update(source.encode())
        return digest.hexdigest()
    package = (path.parent / "__init__.py").is_file()
    for file in sorted(path.parent.glob("*.py")) if package else [path]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _element(where: Location | None) -> Element | None:
    if where is None:
        return None
    return Element(
        tensor=where.tensor,
        index=where.index,
        got=where.got.hex(),
        exact=where.exact.hex(),
        bound=where.bound,
        margin=where.margin,
    )


def inputs_sha256(spec: ProblemSpec) -> str:
    """Of the bytes of every tensor of the problem, in the order of its fields."""
    problem = spec.build()
    digest = hashlib.sha256()
    for field in fields(problem):
        value = getattr(problem, field.name)
        if isinstance(value, torch.Tensor):
            digest.update(field.name.encode() + b"\0" + bytes_of(value))
    return digest.hexdigest()


def _known(spec: ProblemSpec | None, problems: dict[str, dict[str, Any]]) -> str | None:
    """The problem's id; its spec is noted in ``problems``."""
    if spec is None:
        return None
    data = _plain(spec.to_json())
    problems[problem_id(data)] = data
    return problem_id(data)


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a file: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(data))
    return plain


def _points(detail: Detail, problems: dict[str, dict[str, Any]]) -> PointsPart:
    step = max(1, math.ceil(len(detail.points) / MOST_POINTS))
    chosen: list[Point] = detail.points[::step]
    worst = max(detail.points, key=lambda p: p.margin, default=None)
    if worst is not None and all(p is not worst for p in chosen):
        chosen.append(worst)
    return PointsPart(
        problem=[str(_known(p.spec, problems)) for p in chosen],
        error=[p.error for p in chosen],
        bound=[p.bound for p in chosen],
        margin=[p.margin for p in chosen],
        rms_error=[p.rms_error for p in chosen],
        rms_predicted=[p.rms_predicted for p in chosen],
    )


def _tensor_part(
    outcome: Outcome, dtype: str, name: str, summary: TensorSummary, problems: dict[str, dict[str, Any]]
) -> TensorPart:
    detail, typical = summary.detail, summary.detail.typical_rms()
    special = [counts for (d, c), counts in outcome.checks.items() if d == dtype and _is_special(c)]
    passed = sum(counts[Status.PASS] for counts in special)
    failed = sum(counts[Status.FAIL] for counts in special)
    tally = summary.rms if summary.rms.judges else summary.rms_all
    rejected = any(
        f.dtype == dtype and (f.record.where is None or f.record.where.tensor == name)
        for f in outcome.findings
        if f.record.where is not None or name == "O"
    )
    return TensorPart(
        dtype=dtype,
        tensor=name,
        cases=summary.cases,
        elements=summary.elements,
        over_bound=summary.over,
        worst_margin=summary.worst.margin if summary.worst else 0.0,
        worst=_element(summary.worst),
        worst_problem=_known(summary.worst_spec, problems),
        worst_inputs_sha256=inputs_sha256(summary.worst_spec) if summary.worst_spec else None,
        rms_ratio=tally.ratio,
        rms_standard_error=None
        if tally.ratio is None
        else tally.standard_error / (2 * max(tally.ratio, 1e-9)),
        rms_judged=summary.rms.judges,
        rms_error=typical[0] if typical else None,
        rms_predicted=typical[1] if typical else None,
        histogram=HistogramPart(exact=detail.exact, bins=detail.bins, above=detail.above),
        points=_points(detail, problems) if detail.points else None,
        special_passed=passed,
        special_total=passed + failed,
        verdict="fail" if rejected else "pass",
    )


def _is_special(check: str) -> bool:
    return not check.endswith((".bound", ".rms", ".algorithm", ".score_scale", ".cast_of_p"))


def finding_part(finding: Finding, problems: dict[str, dict[str, Any]]) -> FindingPart:
    """A finding as data; its spec is noted in ``problems``."""
    record = finding.record
    return FindingPart(
        check=record.check,
        dtype=finding.dtype,
        message=record.message,
        cases=finding.cases,
        where=_element(record.where),
        problem=record.problem,
        problem_id=_known(finding.spec, problems),
        evidence=list(record.evidence),
        likely=list(finding.diagnoses),
    )
