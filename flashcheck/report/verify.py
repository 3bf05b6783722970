"""Runs a certificate's worst cases and findings again and compares what comes out, bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flashcheck.certify import Finding, one_thread
from flashcheck.checks import CHECKS, Judged, Location, Status
from flashcheck.checks.diagnose import diagnose
from flashcheck.checks.measure import Measured
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.kernel import Kernel
from flashcheck.report.build import certificate_of_nothing, finding_part, inputs_sha256
from flashcheck.report.certificate import Certificate, Element, FindingPart, TensorPart


@dataclass(frozen=True, slots=True)
class Again:
    """One recorded number, computed again.

    Attributes:
        dtype, tensor, problem: which; ``tensor`` is the check's name for a finding.
        recorded, now: margins; NaN where a finding has none.
        differs: what is not the same, in words; empty: every bit is.
        over: the element now lies outside its bound, or the check fails.
    """

    dtype: str
    tensor: str
    problem: str
    recorded: float
    now: float
    differs: tuple[str, ...]
    over: bool


def run_again(certificate: Certificate, kernel: Kernel, device: str) -> list[Again]:
    """Every tensor's worst problem, then every finding that has a problem."""
    judged: dict[str, Judged] = {}

    def judge(problem: str) -> Judged:
        if problem not in judged:
            spec = ProblemSpec.from_json(certificate.problems[problem])
            judged[problem] = Judged(kernel, spec.build(), device)
        return judged[problem]

    with one_thread():
        rows = [
            _tensor_again(t, judge(t.worst_problem), certificate.problems[t.worst_problem])
            for t in certificate.tensors
            if t.worst is not None and t.worst_problem is not None
        ]
        rows += [
            _finding_again(f, judge(f.problem_id)) for f in certificate.findings if f.problem_id is not None
        ]
    return rows


def judge_problem(
    certificate: Certificate, problem: str, kernel: Kernel, device: str
) -> tuple[list[str], list[FindingPart]]:
    """One problem under every check: (names of checks that passed, findings)."""
    spec = ProblemSpec.from_json(certificate.problems[problem])
    judged = Judged(kernel, spec.build(), device)
    passed: list[str] = []
    findings: list[FindingPart] = []
    with one_thread():
        for name, check in CHECKS.items():
            record = check.on(judged)
            if record.failed:
                guesses = () if record.where is None else diagnose(judged)
                findings.append(finding_part(Finding(record, spec.dtype, spec, 1, guesses), {}))
            elif record.status is Status.PASS:
                passed.append(name)
            if not judged.answers():
                break
    return passed, findings


def _tensor_again(recorded: TensorPart, judged: Judged, spec: dict[str, Any]) -> Again:
    assert recorded.worst is not None
    differs: list[str] = []
    if recorded.worst_inputs_sha256 not in (None, inputs_sha256(ProblemSpec.from_json(spec))):
        differs.append("inputs")
    measured = _measured(judged).get(recorded.tensor)
    worst = None if measured is None else measured.worst
    if worst is None:
        differs.append("the kernel returned nothing to judge")
        now, over = math.nan, True
    else:
        differs += _differences(recorded.worst, worst)
        now, over = worst.margin, worst.margin > 1
    return Again(
        recorded.dtype,
        recorded.tensor,
        recorded.worst_problem or "",
        recorded.worst_margin,
        now,
        tuple(differs),
        over,
    )


def _measured(judged: Judged) -> dict[str, Measured]:
    if not judged.answers():
        return {}
    measured = dict(judged.measured)
    if judged.kernel.backward is not None and judged.backward_defined and judged.differentiates():
        measured |= judged.measured_gradients
    return measured


def _differences(recorded: Element, now: Location) -> list[str]:
    if recorded.index != now.index:
        return [f"worst element is {list(now.index)}, was {list(recorded.index)}"]
    pairs = {
        "got": (float.fromhex(recorded.got), now.got),
        "exact": (float.fromhex(recorded.exact), now.exact),
        "bound": (recorded.bound, now.bound),
        "margin": (recorded.margin, now.margin),
    }
    return [
        f"{name} {new.hex()}, was {old.hex()}" for name, (old, new) in pairs.items() if old.hex() != new.hex()
    ]


def _finding_again(recorded: FindingPart, judged: Judged) -> Again:
    old = math.nan if recorded.where is None else recorded.where.margin
    known = recorded.check in CHECKS
    record = CHECKS[recorded.check].on(judged) if known else None
    if record is None:
        differs, now = ["no check of that name any more"], math.nan
    elif not record.failed:
        differs, now = ["passes now"], math.nan
    else:
        now = math.nan if record.where is None else record.where.margin
        differs = [] if now.hex() == old.hex() else ["fails otherwise"]
    failed = record is not None and record.failed
    return Again(recorded.dtype, recorded.check, recorded.problem_id or "", old, now, tuple(differs), failed)


def changes(certificate: Certificate, kernel: Kernel, device: str) -> list[str]:
    """What of the kernel, the machine and the versions is not as recorded; a line each."""
    here = certificate_of_nothing(kernel, device)
    pairs = {
        "kernel source": (certificate.kernel.source_sha256[:12], here.kernel.source_sha256[:12]),
        "device": (certificate.machine.device, here.machine.device),
        "platform": (certificate.machine.platform, here.machine.platform),
        **{f"{k} version": (v, here.versions.get(k, "none")) for k, v in certificate.versions.items()},
    }
    lines = [f"{name}: was {old}, is {new}" for name, (old, new) in pairs.items() if old != new]
    for name, old_part, new_part in (
        ("declared arithmetic", certificate.kernel.arithmetic, here.kernel.arithmetic),
        ("declared capabilities", certificate.kernel.capabilities, here.kernel.capabilities),
        ("machine model", certificate.machine.model, here.machine.model),
    ):
        if old_part != new_part:
            lines.append(f"{name}: another one")
    return lines
