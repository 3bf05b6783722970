"""Makes a certificate out of an outcome."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

import flashcheck
from flashcheck.certify import Finding, Outcome, TensorSummary
from flashcheck.checks import Location, Status
from flashcheck.checks.judged import on_device
from flashcheck.inputs.coverage import required
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Kernel
from flashcheck.report.certificate import (
    Certificate,
    CheckPart,
    CoveragePart,
    Element,
    FindingPart,
    KernelPart,
    MachinePart,
    RunPart,
    SlackPart,
    TensorPart,
)


def certificate_of(
    kernel: Kernel,
    outcome: Outcome,
    device: str,
    command: str,
    started: datetime.datetime,
    probed: dict[str, Any] | None = None,
) -> Certificate:
    """The certificate of one run of ``kernel`` on ``device``; ``command`` repeats it.

    ``probed``: what a probe of the device found (``probe.gate.Gate.describe``).
    """
    plan = outcome.plan
    return Certificate(
        verdict=outcome.verdict.value,
        kernel=_kernel_part(kernel, device),
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
            started=started.isoformat(timespec="seconds"),
            stopped=outcome.stopped,
            command=command,
        ),
        tensors=[
            _tensor_part(outcome, dtype, name, summary)
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
        findings=[_finding_part(f) for f in outcome.findings],
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
        coverage=CoveragePart(
            required=list(required(kernel.capabilities)),
            missing={dtype: list(labels) for dtype, labels in outcome.missing.items()},
        ),
        judge_faults=outcome.judge_faults,
    )


def versions() -> dict[str, str]:
    """flashcheck, torch, triton and Python."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "not installed"
    return {
        "flashcheck": flashcheck.__version__,
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
    }


def _order(dtypes: tuple[str, ...]) -> Any:
    return lambda item: (dtypes.index(item[0][0]), item[0][1] != "O", item[0][1])


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _machine(kernel: Kernel, device: str) -> dict[str, Any]:
    return kernel.machine(torch.device(device)).describe()


def _kernel_part(kernel: Kernel, device: str) -> KernelPart:
    arithmetic: dict[str, dict[str, Any]] = {}
    low, high = kernel.capabilities.head_dim
    dim = min(max(64, low), high)
    for dtype in kernel.capabilities.dtypes:
        spec = ProblemSpec(dtype=dtype, num_queries=128, num_keys=128, head_dim=dim, value_dim=dim)
        arithmetic[dtype] = kernel.arithmetic(on_device(spec.outline(), torch.device(device))).describe()
    return KernelPart(
        name=kernel.name,
        source=kernel.source,
        source_sha256=_hash(kernel.source),
        capabilities=kernel.capabilities.describe(),
        arithmetic=arithmetic,
    )


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


def _tensor_part(outcome: Outcome, dtype: str, name: str, summary: TensorSummary) -> TensorPart:
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
        worst_problem=summary.worst_spec.to_json() if summary.worst_spec else None,
        rms_ratio=tally.ratio,
        rms_standard_error=None
        if tally.ratio is None
        else tally.standard_error / (2 * max(tally.ratio, 1e-9)),
        rms_judged=summary.rms.judges,
        special_passed=passed,
        special_total=passed + failed,
        verdict="fail" if rejected else "pass",
    )


def _is_special(check: str) -> bool:
    return not check.endswith((".bound", ".rms", ".algorithm"))


def _finding_part(finding: Finding) -> FindingPart:
    record = finding.record
    return FindingPart(
        check=record.check,
        dtype=finding.dtype,
        message=record.message,
        cases=finding.cases,
        where=_element(record.where),
        problem=record.problem,
        spec=None if finding.spec is None else finding.spec.to_json(),
        evidence=list(record.evidence),
        likely=list(finding.diagnoses),
    )
