"""Judges a kernel on a plan. Data in, data out: events while it runs, an Outcome at the end."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from flashcheck.bounds.identify import TilingTally, can_identify
from flashcheck.bounds.score_tests import DIRECTIONS
from flashcheck.checks import CHECKS, Judged, JudgeError, Location, Record, Status
from flashcheck.checks.bias import BiasTally
from flashcheck.checks.diagnose import diagnose
from flashcheck.checks.measure import Measured
from flashcheck.checks.rms import RmsTally
from flashcheck.checks.score_tests import ScoreTally
from flashcheck.detail import Detail
from flashcheck.inputs.combinations import Combination, Covering, choices_of, combinations_of
from flashcheck.inputs.coverage import covered, required
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.inputs.values import FAMILIES
from flashcheck.kernel import Kernel
from flashcheck.plan import LEVELS, Case, Plan

SHORTEST_IDENTIFYING = 65
"""Keys of the shortest problem that candidate tilings are tried on: most tiles hold 64 or more."""
MOST_IDENTIFYING = 3
"""Problems per dtype that they are tried on: each costs a bound for every candidate."""


class Verdict(StrEnum):
    """What a run says about a kernel."""

    CERTIFIED = "certified"
    REJECTED = "rejected"
    INCOMPLETE = "incomplete"
    JUDGE_FAILED = "judge failed"


@dataclass(slots=True)
class TensorSummary:
    """One output tensor over all problems of one dtype.

    Attributes:
        cases, elements: how many were judged; over: elements outside their bound.
        worst: the element with the largest margin, and the spec of its problem.
        rms_all: over the ordinary families; rms: those of them whose prediction is sharp enough to gate.
        scores: score tests over the same problems as rms, by direction (O only).
        bias: mean signed error, over the problems of ``rms``.
        detail: all margins and a point per problem, for reports.
    """

    cases: int = 0
    elements: int = 0
    over: int = 0
    worst: Location | None = None
    worst_spec: ProblemSpec | None = None
    rms: RmsTally = field(default_factory=RmsTally)
    rms_all: RmsTally = field(default_factory=RmsTally)
    scores: dict[str, ScoreTally] = field(default_factory=lambda: {name: ScoreTally() for name in DIRECTIONS})
    bias: BiasTally = field(default_factory=BiasTally)
    detail: Detail = field(default_factory=Detail)

    def add(self, measured: Measured, spec: ProblemSpec) -> None:
        self.cases += 1
        self.elements += measured.elements
        self.over += measured.over
        worst = measured.worst
        is_worst = worst is not None and (self.worst is None or worst.margin > self.worst.margin)
        if is_worst:
            self.worst, self.worst_spec = worst, spec
        self.detail.add(measured, spec, is_worst)
        if "ordinary" in FAMILIES[spec.family].properties and spec.gradient == "normal":
            self.rms_all.add(measured)
            if measured.gates:
                self.rms.add(measured)
                self.bias.add(measured)


@dataclass(frozen=True, slots=True)
class Finding:
    """A failed check: the first record of its kind, how often it failed, and what the fault may be.

    Attributes:
        record: the first failure; spec: its problem (None for a group of problems).
        cases: problems on which the check failed.
        diagnoses: guesses that a second experiment supports.
    """

    record: Record
    dtype: str
    spec: ProblemSpec | None
    cases: int
    diagnoses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Combinations:
    """Pairs or triples of declared option values of one dtype.

    Attributes:
        strength: 2 or 3. covered: judged; possible: in the declared space, less the forbidden ones.
    """

    strength: int
    covered: int
    possible: int


@dataclass(slots=True)
class Outcome:
    """Everything a certificate needs.

    Attributes:
        tensors: (dtype, tensor) -> summary. checks: (dtype, check) -> status -> count.
        slack: (dtype, family, tensor) -> median of bound / |error| of each problem.
        rungs: (dtype, family, pass) -> rung of the oracle -> rows that it served ("unresolved": rows whose
            reference is not proved good enough).
        tilings: dtype -> which tilings explain the bits, for kernels that declare none.
        missing: dtype -> declared features that were not judged.
        combinations: dtype -> strength -> how many combinations of option values were judged.
        durations: dtype -> seconds spent on its problems.
        stopped: why the run ended early, or "".
    """

    plan: Plan
    tensors: dict[tuple[str, str], TensorSummary] = field(default_factory=lambda: defaultdict(TensorSummary))
    checks: dict[tuple[str, str], dict[Status, int]] = field(default_factory=dict)
    slack: dict[tuple[str, str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    rungs: dict[tuple[str, str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    findings: list[Finding] = field(default_factory=list)
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tilings: dict[str, TilingTally] = field(default_factory=lambda: defaultdict(TilingTally))
    combinations: dict[str, dict[int, Combinations]] = field(default_factory=dict)
    judge_faults: list[str] = field(default_factory=list)
    judged: int = 0
    seconds: float = 0.0
    durations: dict[str, float] = field(default_factory=dict)
    stopped: str = ""
    interrupted: bool = False

    @property
    def verdict(self) -> Verdict:
        if self.judge_faults:
            return Verdict.JUDGE_FAILED
        if self.findings:
            return Verdict.REJECTED
        if self.missing or self.stopped or not self.judged:
            return Verdict.INCOMPLETE
        return Verdict.CERTIFIED

    def median_slack(self) -> dict[tuple[str, str, str], float]:
        """(dtype, family, tensor) -> median over problems of the median bound / |error|; inf: all exact."""
        return {key: statistics.median(values) for key, values in self.slack.items()}


@dataclass(frozen=True, slots=True)
class Progress:
    """Sent after every case."""

    done: int
    total: int
    case: Case
    failures: int


@dataclass(slots=True)
class _Seen:
    """What was judged of one dtype: labels of ``coverage.required``, combinations by strength."""

    labels: set[str]
    combinations: dict[int, set[Combination]]


@dataclass(slots=True)
class _Failure:
    record: Record
    spec: ProblemSpec
    cases: int = 1


def certify(
    kernel: Kernel,
    plan: Plan,
    *,
    device: str = "cpu",
    max_seconds: float | None = None,
    stop_at_first: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Outcome:
    """Runs the plan. A kernel's faults are findings; only a fault of the judge ends the run early, or with
    ``stop_at_first`` the first problem on which a check fails.

    Ctrl-C ends it too: what was judged until then is returned with ``interrupted`` set.
    """
    with one_thread():
        return _certify(kernel, plan, device, max_seconds, stop_at_first, on_progress)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread within each torch operation: problems are small, and threads that wait for each other
    at the end of every operation cost more than they bring (7 times more on a busy machine)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _certify(
    kernel: Kernel,
    plan: Plan,
    device: str,
    max_seconds: float | None,
    stop_at_first: bool,
    on_progress: Callable[[Progress], None],
) -> Outcome:
    outcome = Outcome(plan)
    started = time.perf_counter()
    outcome.judge_faults += [f"self-test: {fault}" for fault in kernel.self_test()]
    failures: dict[tuple[str, str, str], _Failure] = {}
    seen = {dtype: _Seen(set(), {2: set(), 3: set()}) for dtype in plan.dtypes}
    try:
        for number, case in enumerate(plan.cases):
            if outcome.judge_faults:
                break
            if max_seconds is not None and time.perf_counter() - started > max_seconds:
                outcome.stopped = (
                    f"time limit of {max_seconds:g} s after {number} of {len(plan.cases)} problems"
                )
                break
            began = time.perf_counter()
            _judge_case(kernel, case, device, outcome, failures, seen)
            spent = outcome.durations.get(case.spec.dtype, 0.0)
            outcome.durations[case.spec.dtype] = spent + time.perf_counter() - began
            on_progress(Progress(number + 1, len(plan.cases), case, len(failures)))
            if stop_at_first and failures:
                outcome.stopped = f"a check failed on problem {number + 1} of {len(plan.cases)}"
                break
        outcome.findings += [_finding(kernel, device, key[0], f) for key, f in failures.items()]
    except KeyboardInterrupt:
        outcome.interrupted = True
        outcome.stopped = f"interrupted after {outcome.judged} of {len(plan.cases)} problems"
        known = {(f.dtype, f.record.check) for f in outcome.findings}
        outcome.findings += [
            Finding(f.record, key[0], f.spec, f.cases, ())
            for key, f in failures.items()
            if (key[0], f.record.check) not in known
        ]
    _judge_groups(outcome)
    _note_missing(kernel, outcome, seen)
    outcome.seconds = time.perf_counter() - started
    return outcome


def _judge_case(
    kernel: Kernel,
    case: Case,
    device: str,
    outcome: Outcome,
    failures: dict[tuple[str, str, str], _Failure],
    seen: dict[str, _Seen],
) -> None:
    spec = case.spec
    problem = spec.build()
    judged = Judged(kernel, problem, device)
    outcome.judged += 1
    try:
        # A kernel that breaks on the plain problem breaks every check: one finding says it all.
        names = case.checks if judged.answers() else ("forward.bound",)
        for name in names:
            record = CHECKS[name].on(judged)
            counts = outcome.checks.setdefault((spec.dtype, name), dict.fromkeys(Status, 0))
            counts[record.status] += 1
            if record.failed:
                tensor = record.where.tensor if record.where else ""
                key = (spec.dtype, name, tensor)
                if key in failures:
                    failures[key].cases += 1
                else:
                    failures[key] = _Failure(record, spec)
        if judged.answers():
            measured_all = dict(judged.measured)
            asked = kernel.backward is not None and "backward.bound" in case.checks
            if asked and judged.backward_defined and judged.differentiates():
                measured_all |= judged.measured_gradients
            for tensor, measured in measured_all.items():
                outcome.tensors[spec.dtype, tensor].add(measured, spec)
                if measured.elements:
                    outcome.slack[spec.dtype, spec.family, tensor].append(measured.slack)
            if judged.bound.out.prediction_gates and "ordinary" in FAMILIES[spec.family].properties:
                for direction, sums in judged.score_sums.items():
                    outcome.tensors[spec.dtype, "O"].scores[direction].add(sums)
                _identify(judged, outcome.tilings[spec.dtype])
            seen[spec.dtype].labels |= covered(spec, problem)
            choices = choices_of(spec, kernel.capabilities)
            for strength, judged_ones in seen[spec.dtype].combinations.items():
                judged_ones.update(combinations_of(choices, strength))
            for name, rows in judged.rungs.items():
                outcome.rungs[spec.dtype, spec.family, name] += rows
    except JudgeError as error:
        outcome.judge_faults.append(str(error))
    except Exception as error:  # the kernel's own exceptions are KernelErrors: this one is the judge's
        fault = f"{type(error).__name__} on {problem.describe()}: {error}"
        outcome.judge_faults.append(fault)


def _identify(judged: Judged, tally: TilingTally) -> None:
    """Tries the candidate tilings on a few long problems of a kernel that declares none."""
    long = judged.problem.num_keys >= SHORTEST_IDENTIFYING
    if tally.problems < MOST_IDENTIFYING and long and can_identify(judged.rules.arithmetic):
        rules = judged.rules
        tally.add(judged.problem, judged.exact, judged.result.out, rules.arithmetic, rules.machine)


def _finding(kernel: Kernel, device: str, dtype: str, failure: _Failure) -> Finding:
    guesses: tuple[str, ...] = ()
    if failure.record.where is not None:
        guesses = diagnose(Judged(kernel, failure.spec.build(), device))
    return Finding(failure.record, dtype, failure.spec, failure.cases, guesses)


def _judge_groups(outcome: Outcome) -> None:
    """rms ratios, biases and score tests, dtype by dtype."""
    for (dtype, tensor), summary in outcome.tensors.items():
        if tensor not in ("O", "dQ", "dK", "dV"):
            continue
        group = f"{dtype}, ordinary values"
        records = [summary.rms.verdict(tensor, group), summary.bias.verdict(tensor, group)]
        if tensor == "O":
            records += [tally.verdict(direction, group) for direction, tally in summary.scores.items()]
        for record in records:
            counts = outcome.checks.setdefault((dtype, record.check), dict.fromkeys(Status, 0))
            counts[record.status] += 1
            if record.failed:
                outcome.findings.append(Finding(record, dtype, None, 1, ()))


def _note_missing(kernel: Kernel, outcome: Outcome, seen: dict[str, _Seen]) -> None:
    owed = required(kernel.capabilities)
    level = LEVELS[outcome.plan.level]
    possible = {n: len(Covering.of(kernel.capabilities, n).open) for n in (2, 3)}
    words = {2: "pairs", 3: "triples"}
    for dtype in kernel.capabilities.dtypes:
        if dtype not in seen:
            outcome.missing[dtype] = ("the whole dtype",)
            continue
        missing = [label for label in owed if label not in seen[dtype].labels]
        outcome.combinations[dtype] = {}
        for strength, combinations in seen[dtype].combinations.items():
            excluded = outcome.plan.forbidden if strength == level.strength else 0
            count = Combinations(strength, len(combinations), possible[strength] - excluded)
            outcome.combinations[dtype][strength] = count
            if strength == level.strength and count.covered < count.possible:
                lacking = count.possible - count.covered
                missing.append(f"{lacking} of {count.possible} {words[strength]} of option values")
        if missing:
            outcome.missing[dtype] = tuple(missing)
