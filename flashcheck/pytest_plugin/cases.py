"""The generated tests: which there are, what each says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from flashcheck.devices import interpret_without_gpu
from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.pytest_plugin.judge import Group, Subject, judged, subject_from
from flashcheck.pytest_plugin.session import Session
from flashcheck.report.certificate import Certificate
from flashcheck.report.terminal import finding_lines
from flashcheck.settings import read_settings

COVERAGE = "coverage"
"""The test beside the checks: everything that the kernel declares was judged."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test: one check of one kernel in one dtype. Call it with the kernel."""

    session: Session
    group: Group
    check: str
    is_flashcheck_case = True

    def prepare(self) -> list[tuple[str, object]]:
        """Judges the group, once per run; properties for JUnit. Raises where the judge failed."""
        certificate = judged(self.session, self.group)
        if certificate.verdict == "judge failed":
            pytest.fail("the judge failed: " + "; ".join(certificate.judge_faults), pytrace=False)
        properties: list[tuple[str, object]] = [
            ("kernel", self.group.subject.name),
            ("check", self.check),
            ("dtype", self.group.dtype),
            ("seed", certificate.run.seed),
            ("cases", certificate.run.judged),
        ]
        for t in certificate.tensors:
            properties.append((f"margin_{t.tensor}", t.worst_margin))
            if t.rms_ratio is not None:
                properties.append((f"rms_ratio_{t.tensor}", t.rms_ratio))
        return properties

    def __call__(self, kernel: Any) -> None:
        """Fails with the check's own report; skips where the check does not apply to the kernel."""
        __tracebackhide__ = True
        del kernel  # for the reader of the test; the group knows it
        certificate = judged(self.session, self.group)
        if self.check == COVERAGE:
            if gaps := gaps_of(certificate):
                pytest.fail(
                    f"INCOMPLETE  {self.group.subject.name}  {self.group.dtype}\n{gaps}", pytrace=False
                )
            return
        findings = [f for f in certificate.findings if f.check == self.check]
        if findings:
            pytest.fail(report_of(certificate, findings), pytrace=False)
        counts = [c for c in certificate.checks if c.check == self.check]
        if not any(c.passed for c in counts):
            pytest.skip(
                f"{self.check} does not apply to what {self.group.subject.name} declares, or no "
                "problem of this plan could be judged by it"
            )


def report_of(certificate: Certificate, findings: Sequence[Any]) -> str:
    """The findings as the command line prints them."""
    name = certificate.kernel.load_name or certificate.kernel.name
    return "\n".join(line.plain for f in findings for line in finding_lines(name, f))


def gaps_of(certificate: Certificate) -> str:
    """What was declared and not judged; empty where everything was."""
    lines = [f"  not judged: {', '.join(labels)}" for labels in certificate.coverage.missing.values()]
    return "\n".join(
        [*lines, *([f"  stopped: {certificate.run.stopped}"] if certificate.run.stopped else [])]
    )


def parameters(
    session: Session,
    place: str,
    kernels: Sequence[Any] | None,
    expected_failed: Mapping[str, str] | None = None,
) -> list[Any]:
    """pytest parameters (kernel, check): checks outermost, so that workers start on different groups.

    ``place``: the id of the test function.
    Raises pytest's UsageError for a kernel, dtype, check or level that does not exist.
    """
    try:
        return _parameters(session, place, kernels, expected_failed or {})
    except ArgumentError as error:
        raise pytest.UsageError(f"flashcheck: {error}") from None


def _parameters(
    session: Session, place: str, kernels: Sequence[Any] | None, expected: Mapping[str, str]
) -> list[Any]:
    from flashcheck.checks import CHECKS

    interpret_without_gpu()
    given = kernels if kernels is not None else _named(session)
    subjects = _told_apart([subject_from(thing, f"{place}#{n}") for n, thing in enumerate(given)])
    groups = _groups(session, subjects)
    session.used = True
    for name in expected:
        if name not in (*CHECKS, COVERAGE):
            raise UnknownNameError("expected_failed", name, [*CHECKS, COVERAGE])
    made = []
    for check in (*CHECKS, COVERAGE):
        for group in groups:
            if check.startswith("backward.") and group.subject.kernel.backward is None:
                continue
            marks = []
            if session.groups_of_xdist:
                marks.append(pytest.mark.xdist_group(f"{group.subject.name}-{group.dtype}"))
            if check in expected:
                marks.append(must_fail(expected[check]))
            case = Case(session, group, check)
            identity = f"{group.subject.name}-{check}-{group.dtype}"
            made.append(pytest.param(group.subject.given, case, id=identity, marks=marks))
    return made


def _told_apart(subjects: Sequence[Subject]) -> list[Subject]:
    """Names that occur twice get a number."""
    seen: dict[str, int] = {}
    told = []
    for subject in subjects:
        seen[subject.name] = count = seen.get(subject.name, 0) + 1
        told.append(subject if count == 1 else replace(subject, name=f"{subject.name}#{count}"))
    return told


def must_fail(reason: str) -> pytest.MarkDecorator:
    """Expected to fail, strictly; a fault of the judge is not what was expected."""
    return pytest.mark.xfail(reason=reason, strict=True, raises=pytest.fail.Exception)


def _named(session: Session) -> Sequence[str]:
    names = session.options.kernels or read_settings(session.root).kernels
    if not names:
        raise ArgumentError(
            "--flashcheck-kernel", "none given", "a kernel name, or kernels in [tool.flashcheck]"
        )
    return names


def _groups(session: Session, subjects: Sequence[Subject]) -> list[Group]:
    asked = session.options.dtypes
    declared = {d for s in subjects for d in s.kernel.capabilities.dtypes}
    for dtype in asked:
        if dtype not in declared:
            raise UnknownNameError("--flashcheck-dtype", dtype, declared)
    return [
        Group.from_options(session, subject, dtype)
        for subject in subjects
        for dtype in subject.kernel.capabilities.dtypes
        if not asked or dtype in asked
    ]


def certify_in_test(
    session: Session, kernel: Any, *, complete: bool = True, dtype: str | None = None, **narrowing: Any
) -> Certificate:
    """The ``certify`` fixture: judges ``kernel``, one dtype or all that it declares.

    Args:
        complete: fail where something declared was not judged.
        dtype: only this one.
        narrowing: level, max_cases, max_time, seed, device, as on the command line.

    Returns:
        The certificate of all dtypes judged. The test fails unless it is certified.
    """
    __tracebackhide__ = True
    from flashcheck.report.merge import merged

    interpret_without_gpu()
    session.objects.append(kernel)  # kept alive: its id names it
    subject = subject_from(kernel, f"worker {session.worker_number}, object {id(kernel)}")
    dtypes = subject.kernel.capabilities.dtypes
    if dtype is not None and dtype not in dtypes:
        raise UnknownNameError("dtype", dtype, dtypes)
    session.used = True
    chosen = [d for d in dtypes if dtype in (None, d) and d in (session.options.dtypes or dtypes)]
    parts = [judged(session, Group.from_options(session, subject, d, **narrowing)) for d in chosen]
    certificate = merged(parts)
    if certificate.verdict == "judge failed":
        pytest.fail("the judge failed: " + "; ".join(certificate.judge_faults), pytrace=False)
    if certificate.findings:
        pytest.fail(report_of(certificate, certificate.findings), pytrace=False)
    if complete and (gaps := gaps_of(certificate)):
        pytest.fail(f"INCOMPLETE  {subject.name}\n{gaps}", pytrace=False)
    return certificate
