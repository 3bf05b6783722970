"""Golden vectors against a kernel: the stored answers, judged by the stored bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from flashcheck.checks import Judged, KernelError
from flashcheck.checks.judged import on_device
from flashcheck.formats import BF16
from flashcheck.golden import files
from flashcheck.golden.answer import GRADIENTS, Tensors
from flashcheck.golden.entry import GROUPS
from flashcheck.golden.limits import decoded, named_arithmetics, tensor_bounds
from flashcheck.golden.patterns import from_hex
from flashcheck.golden.record import Data, exact_of, problem_of, stored_of
from flashcheck.golden.rounding import PATTERNS, width
from flashcheck.kernel import Kernel
from flashcheck.problem import Problem

COMPUTED = "the kernel's own"
"""Stands for a named arithmetic where none covers what the kernel declares."""


@dataclass(slots=True)
class Tally:
    """One group: problems judged and not applicable, elements, the worst margin, failures."""

    judged: int = 0
    not_applicable: Counter[str] = field(default_factory=Counter)
    elements: int = 0
    worst: float = 0.0
    worst_at: str = ""
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """What a run found: group -> tally; arithmetic -> problems judged by it."""

    groups: dict[str, Tally] = field(default_factory=dict)
    arithmetics: Counter[str] = field(default_factory=Counter)
    interrupted: bool = False

    @property
    def failures(self) -> list[str]:
        return [failure for tally in self.groups.values() for failure in tally.failures]

    @property
    def judged(self) -> int:
        return sum(tally.judged for tally in self.groups.values())


def run(
    kernel: Kernel,
    folder: Path,
    groups: tuple[str, ...] = (),
    device: str = "cpu",
    on_problem: Callable[[int, int, str], None] = lambda *_: None,
) -> Run:
    """Judges the kernel on every problem that its declaration covers; Ctrl-C ends it with what there is."""
    names = groups or tuple(GROUPS)
    problems = {name: files.read_group(folder, name)["problems"] for name in names}
    total, done = sum(map(len, problems.values())), 0
    found = Run()
    try:
        for name, members in problems.items():
            tally = found.groups.setdefault(name, Tally())
            for data in members:
                _judge(kernel, data, torch.device(device), tally, found.arithmetics)
                done += 1
                on_problem(done, total, data["id"])
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def _judge(kernel: Kernel, data: Data, device: torch.device, tally: Tally, arithmetics: Counter[str]) -> None:
    problem = problem_of(data)
    reason = refusal(kernel, problem, data)
    if reason is not None:
        tally.not_applicable[reason] += 1
        return
    tally.judged += 1
    judged = Judged(kernel, problem, str(device))
    try:
        name, limits = _limits(judged, data)
        arithmetics[name] += 1
        for tensor, got in _answers(judged, data):
            _compare(data, tensor, got, limits[tensor], tally)
    except KernelError as error:
        tally.failures.append(f"{data['id']}: {error}")


def refusal(kernel: Kernel, problem: Problem, data: Data) -> str | None:
    """Why the kernel's declaration excludes a problem; None where it does not."""
    capabilities = kernel.capabilities
    reason = capabilities.refuses(problem)
    if reason is not None:
        return reason
    if any(x != 1.0 for x in (problem.q_descale, problem.k_descale, problem.v_descale)):
        return "descales cannot be declared"
    if "EmptyRows" in data["flags"] and not capabilities.empty_rows:
        return "empty rows are not declared"
    if {"NonFinite", "BeyondFloat32"} & set(data["flags"]) and not capabilities.isolates_nonfinite:
        return "non-finite values are not declared"
    return None


Limits = dict[str, tuple[Tensor, Tensor]]
"""Tensor -> (bound, NaN and infinities are legal), flat."""


def _limits(judged: Judged, data: Data) -> tuple[str, Limits]:
    """The stored bounds of a named arithmetic that covers the declaration, else computed ones."""
    rules = judged.rules
    for named in named_arithmetics(judged.problem.format):
        if named.covers(rules.arithmetic, rules.machine):
            return named.name, {
                tensor: decoded(from_hex(x["bounds"][named.name], width(BF16)))
                for tensor, x in data["expected"].items()
                if named.name in x["bounds"]
            }
    tensors = {
        name: Tensors(
            tuple(x["shape"]),
            x["digits"].split(),
            {fmt.name: from_hex(x[fmt.name], width(fmt)) for fmt in PATTERNS},
        )
        for name, x in data["expected"].items()
    }
    bounds = tensor_bounds(judged.problem, tensors, rules.arithmetic, rules.machine)
    return COMPUTED, {
        name: (b.interval.bound.flatten(), b.interval.may_overflow.expand_as(b.interval.bound).flatten())
        for name, b in bounds
    }


def _answers(judged: Judged, data: Data) -> Iterator[tuple[str, Tensor]]:
    """(tensor, the kernel's) for what the kernel declares to return."""
    result = judged.result
    yield "out", result.out
    if result.lse is not None:
        yield "lse", result.lse
    stored = stored_of(data)
    if stored is None or judged.kernel.backward is None or judged.problem.dlse is not None:
        return
    if judged.rules.arithmetic.keeps_probabilities:  # it reads its own P, not what is stored
        return
    moved = on_device(judged.problem, judged.device)
    try:
        raw = judged.kernel.backward(moved, *(x.to(judged.device) for x in stored))
    except Exception as error:
        raise KernelError(f"the backward raised {type(error).__name__}: {error}") from error
    for name in GRADIENTS:
        if name in judged.kernel.capabilities.gradients and name in data["expected"]:
            if name not in raw:
                raise KernelError(f"the backward returned no {name}")
            yield name, raw[name].detach().cpu()


def _compare(data: Data, tensor: str, got: Tensor, limits: tuple[Tensor, Tensor], tally: Tally) -> None:
    exact = exact_of(data["expected"][tensor]).flatten()
    if list(got.shape) != data["expected"][tensor]["shape"]:
        raise KernelError(f"{tensor} has shape {tuple(got.shape)}")
    got = got.double().flatten()
    digits = data["expected"][tensor]["digits"].split()
    overflowed = torch.isinf(exact) & torch.tensor([word[-1:].isdigit() for word in digits], dtype=torch.bool)
    margin = margins(got, exact, *limits, overflowed)
    tally.elements += margin.numel()
    if not margin.numel():
        return
    worst = int(margin.argmax())
    value, place = float(margin[worst]), f"{data['id']} {tensor}[{worst}]"
    if value > tally.worst or not tally.worst_at:
        tally.worst, tally.worst_at = value, place
    if value > 1:
        tally.failures.append(
            f"{place}: got {float(got[worst])!r}, expected {digits[worst]}, "
            f"bound {float(limits[0][worst]):.3g} ({int((margin > 1).sum())} of {margin.numel()} elements)"
        )


def margins(got: Tensor, exact: Tensor, bound: Tensor, legal: Tensor, overflowed: Tensor) -> Tensor:
    """|got - exact| / bound; above 1: rejected. NaN and infinities: 0 where legal or expected, else inf.

    ``overflowed``: exact is inf because float64 ends there; the bound alone judges. Where NaN or inf is
    expected, both are accepted (kernels form inf - inf), the wrong sign of inf is not.
    """
    error = (got - exact).abs()
    ratio = torch.where(error == 0, 0.0, error / bound)
    ratio = torch.where(torch.isinf(bound) & torch.isfinite(error), 0.0, ratio)
    strange = ~torch.isfinite(got)
    ratio = torch.where(strange, torch.where(legal | torch.isinf(bound), 0.0, torch.inf), ratio)
    # Past float64's range and without a bound, a number is just that: whatever the arithmetic gives.
    special = torch.isnan(exact) | (torch.isinf(exact) & ~overflowed)
    wrong_sign = torch.isinf(exact) & torch.isinf(got) & (got != exact)
    # An exact -inf is the log-sum-exp of an empty row: nothing else will do.
    empty = (exact == -torch.inf) & (bound == 0)
    fine = strange & ~wrong_sign & (~empty | (got == exact))
    ratio = torch.where(overflowed, torch.where(torch.isinf(bound) | (got == exact), 0.0, torch.inf), ratio)
    return torch.where(special, torch.where(fine, 0.0, torch.inf), ratio)
