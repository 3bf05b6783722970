"""One problem, judged once: the kernel's result, the oracle's and the bound, shared by all checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.backward import backward_bound
from flashcheck.bounds.forward import forward_bound
from flashcheck.bounds.pairs import Given
from flashcheck.bounds.result import BackwardBound, ForwardBound
from flashcheck.bounds.score_tests import ScoreSums, score_sums
from flashcheck.checks.exhausted import others_hold_it, patiently
from flashcheck.checks.measure import Measured, measure
from flashcheck.checks.reference import (
    BackwardReference,
    ForwardReference,
    backward_reference,
    forward_reference,
)
from flashcheck.errors import ArgumentError
from flashcheck.formats import round_nearest
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.operands import as_multiplied
from flashcheck.oracle import fp64
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.problem import Problem


class KernelError(Exception):
    """The kernel raised, or what it returned has a wrong shape or dtype: a failure of the kernel."""


class JudgeError(Exception):
    """The oracle or a bound failed: no verdict on the kernel."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What judges a problem: the declared arithmetic and the machine it ran on."""

    arithmetic: Arithmetic
    machine: Machine


class Judged:
    """A kernel's answer to a problem next to the exact one; everything is computed when first asked for.

    Attributes:
        kernel: the subject.
        problem: the problem, its tensors on the CPU.
        device: where the kernel runs.
    """

    def __init__(self, kernel: Kernel, problem: Problem, device: str = "cpu") -> None:
        self.kernel = kernel
        self.problem = problem
        self.device = torch.device(device)

    def run(self, problem: Problem | None = None) -> ForwardResult:
        """The kernel's result for a problem (this one by default), on the CPU and validated.

        Raises KernelError where the kernel raised or returned something of another shape, JudgeError where
        other processes left it no memory on the device.
        """
        problem = self.problem if problem is None else problem

        def call() -> tuple[Tensor, Tensor | None]:
            # A kernel that faults on a GPU makes every later call fail, copies included.
            result = self.kernel.forward(on_device(problem, self.device))
            return result.out.detach().cpu(), None if result.lse is None else result.lse.detach().cpu()

        try:
            out, lse = patiently(call, self.device)
        except Exception as error:
            raise self._fault("the kernel", error) from error
        self._validate(problem, out, lse)
        return ForwardResult(out, lse)

    def _fault(self, what: str, error: Exception) -> KernelError | JudgeError:
        """Whose fault it is that ``what`` raised."""
        if others_hold_it(error, self.device):
            return JudgeError(f"{self.device} has no memory left for {what}: other processes hold it")
        return KernelError(f"{what} raised {type(error).__name__}: {error}")

    def _validate(self, problem: Problem, out: Tensor, lse: Tensor | None) -> None:
        shape = (problem.batch, problem.num_heads, problem.num_queries, problem.value_dim)
        if tuple(out.shape) != shape:
            raise KernelError(f"O has shape {tuple(out.shape)}, expected {shape}")
        if out.dtype != (wanted := self.rules.arithmetic.output_format.dtype):
            raise KernelError(f"O has dtype {out.dtype}, the declared output format is {wanted}")
        if lse is None:
            if self.kernel.capabilities.lse:
                raise KernelError("LSE is declared and was not returned")
        elif tuple(lse.shape) != shape[:3]:
            raise KernelError(f"LSE has shape {tuple(lse.shape)}, expected {shape[:3]}")

    @cached_property
    def rules(self) -> Rules:
        """Declared arithmetic and machine for this problem on this device.

        Raises KernelError where the declaration cannot be had: the kernel's own code gives it, and after
        a fault on a GPU no tensor reaches the device any more. ArgumentError passes: a device that no
        machine describes is the user's to change.
        """

        def call() -> Rules:
            moved = on_device(self.problem, self.device)
            return Rules(self.kernel.arithmetic(moved), self.kernel.machine(self.device))

        try:
            return patiently(call, self.device)
        except ArgumentError:
            raise
        except Exception as error:
            raise self._fault("the declaration", error) from error

    @cached_property
    def multiplied(self) -> Problem:
        """The problem as the kernel's products take it: itself, or with q, k, v converted as declared."""
        return as_multiplied(self.problem, self.rules.arithmetic)

    @cached_property
    def _answer(self) -> ForwardResult | KernelError:
        try:
            return self.run()
        except KernelError as error:
            return error

    def answers(self) -> bool:
        """The kernel returned something of the right shape and dtype."""
        return isinstance(self._answer, ForwardResult)

    @property
    def result(self) -> ForwardResult:
        """The kernel's result; raises KernelError, each time, where it has none."""
        if isinstance(self._answer, KernelError):
            raise self._answer
        return self._answer

    @cached_property
    def _forward(self) -> tuple[ForwardReference, ForwardBound]:
        """The oracle's forward from the rungs that this kernel's bound asks for, and that bound."""
        with self._blame("oracle"):
            low = fp64.forward(self.multiplied)
        bound = self._bound_of(low)
        result = self._answer if isinstance(self._answer, ForwardResult) else None
        with self._blame("oracle"):
            reference = forward_reference(self.multiplied, low, bound, result)
        return reference, self._bound_of(reference.quantities) if reference.climbed else bound

    def _bound_of(self, exact: ForwardQuantities) -> ForwardBound:
        rules = self.rules
        with self._blame("bound"):
            return forward_bound(self.multiplied, exact, rules.arithmetic, rules.machine)

    @contextmanager
    def _blame(self, part: str) -> Iterator[None]:
        try:
            yield
        except (JudgeError, KernelError):
            raise
        except Exception as error:
            raise JudgeError(
                f"the {part} failed on {self.problem.describe()}: {type(error).__name__}: {error}"
            ) from error

    @property
    def exact(self) -> ForwardQuantities:
        """The oracle's forward: float64, and higher rungs for the rows that need them."""
        return self._forward[0].quantities

    @property
    def bound(self) -> ForwardBound:
        return self._forward[1]

    @property
    def rungs(self) -> dict[str, Counter[str]]:
        """Pass -> rung -> rows that it served, for the passes judged so far."""
        done = {"forward": self._forward[0].rows}
        if "_backward" in self.__dict__:
            done["backward"] = self._backward.rows
        return done

    @cached_property
    def empty_rows(self) -> Tensor:
        """Boolean (B, H, Nq): rows that see no key (a sink is not a key)."""
        return ~self.exact.visible.any(-1)

    @cached_property
    def measured(self) -> dict[str, Measured]:
        """``O``, and ``LSE`` where the kernel returns it; empty rows are left to their own check."""
        live = ~self.empty_rows
        out = {"O": measure("O", self.result.out, self.bound.out, live)}
        if self.result.lse is not None:
            out["LSE"] = measure("LSE", self.result.lse, self.bound.lse, live)
        return out

    @cached_property
    def score_sums(self) -> dict[str, ScoreSums]:
        """Projections of O's error on the marks of known faults, by the name of the direction."""
        rules = self.rules
        with self._blame("bound"):
            return score_sums(self.exact, self.result.out, self.bound, rules.arithmetic, rules.machine)

    @cached_property
    def gradient_problem(self) -> Problem:
        """The problem with an output gradient: its own, or normal values that follow from its seed. Every
        other seed brings a gradient of the log-sum-exp too, where the backward takes one."""
        if self.problem.dout is not None:
            return self.problem
        p = self.problem
        generator = torch.Generator().manual_seed(p.seed + 1)
        shape = (p.batch, p.num_heads, p.num_queries, p.value_dim)
        dout = torch.randn(shape, generator=generator, dtype=torch.float64)
        dlse = p.dlse
        if dlse is None and self.kernel.capabilities.dlse and p.seed % 2 == 1:
            dlse = torch.randn(shape[:3], generator=generator)
            if p.sink is not None:
                # A row that sees nothing but a sink has the sink's logit for an LSE. Calculus sends its
                # gradient into the sink, the contract lets such a row add nothing: nobody is judged on which.
                dlse = torch.where(self.empty_rows, 0.0, dlse)
        return p.replaced(dout=dout.to(self.rules.arithmetic.output_format.dtype), dlse=dlse)

    @cached_property
    def stored(self) -> tuple[Tensor, Tensor]:
        """O and LSE as the backward gets them: the oracle's, rounded to the kernel's formats."""
        return self.stored_from(self.exact)

    def stored_from(self, exact: ForwardQuantities) -> tuple[Tensor, Tensor]:
        """O and LSE of ``exact``, rounded to the kernel's formats."""
        rules = self.rules.arithmetic
        out = round_nearest(exact.out, rules.output_format).to(rules.output_format.dtype)
        lse = round_nearest(exact.lse, rules.lse_format).to(rules.lse_format.dtype)
        return out, lse

    @cached_property
    def backward_defined(self) -> bool:
        """The stored forward is finite (empty rows' -inf apart), so that gradients mean something."""
        out, lse = self.stored
        return bool(torch.isfinite(out).all()) and bool((torch.isfinite(lse) | (lse == -torch.inf)).all())

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """The kernel's gradients by name (dq, dk, dv, ...), on the CPU and validated."""
        return self.run_backward(*self.stored)

    def run_backward(self, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
        """The kernel's gradients, given a stored forward (B, H, Nq, dv) and (B, H, Nq).

        Raises KernelError where the kernel raised or returned something of another shape.
        """
        backward = self.kernel.backward
        if backward is None:
            raise KernelError("no backward is declared")
        problem = self.gradient_problem

        def call() -> dict[str, Tensor]:
            moved = on_device(problem, self.device)
            raw = backward(moved, out.to(self.device), lse.to(self.device))
            return {name: x.detach().cpu() for name, x in raw.items()}

        try:
            result = patiently(call, self.device)
        except Exception as error:
            raise self._fault("the backward", error) from error
        for name, shape in self.gradient_shapes.items():
            if name not in result:
                raise KernelError(f"the backward returned no {name}")
            if result[name].shape != shape:
                raise KernelError(f"{name} has shape {tuple(result[name].shape)}, expected {tuple(shape)}")
        return result

    @property
    def gradient_shapes(self) -> dict[str, torch.Size]:
        """Name -> shape of the gradients that the kernel owes for this problem."""
        p = self.problem
        inputs = {"dq": p.q, "dk": p.k, "dv": p.v, "dbias": p.bias, "dsink": p.sink}
        shapes = {name: x.shape for name, x in inputs.items() if x is not None} | {"dscale": torch.Size()}
        return {name: shape for name, shape in shapes.items() if name in self.kernel.capabilities.gradients}

    def differentiates(self) -> bool:
        """The backward returned everything declared, in the right shapes."""
        try:
            return bool(self.gradients)
        except KernelError:
            return False

    @property
    def _given(self) -> tuple[Tensor, Tensor] | None:
        """The stored O and LSE; None for an eager kernel, whose backward reads its own P."""
        return None if self.rules.arithmetic.keeps_probabilities else self.stored

    @cached_property
    def _low_gradients(self) -> BackwardQuantities:
        problem, given = self.gradient_problem, self._given or ()
        with self._blame("oracle"):
            return fp64.backward(problem, *given)

    @cached_property
    def _backward(self) -> BackwardReference:
        """The oracle's gradients from the rungs that this kernel's bound asks for, and that bound."""
        answer = self.gradients if self.differentiates() else {}
        problem, low, forward = self.gradient_problem, self._low_gradients, self.exact
        with self._blame("oracle"):
            return backward_reference(problem, forward, low, self._backward_bound_of, answer, self._given)

    @property
    def exact_gradients(self) -> BackwardQuantities:
        """The oracle's gradients, given the stored O and LSE; from scratch for an eager kernel."""
        return self._backward.quantities

    @property
    def backward_bound(self) -> BackwardBound:
        return self._backward.bound

    def _backward_bound_of(self, exact: BackwardQuantities) -> BackwardBound:
        rules, problem, given = self.rules, self.gradient_problem, Given(*self.stored)
        forward, scores = self.exact, self.bound.scores
        with self._blame("bound"):
            return backward_bound(
                problem,
                forward,
                exact,
                given,
                rules.arithmetic,
                rules.machine,
                scores,
                with_scale=self._with_scale,
            )

    @property
    def _with_scale(self) -> bool:
        return "dscale" in self.kernel.capabilities.gradients

    @cached_property
    def measured_gradients(self) -> dict[str, Measured]:
        """``dQ``, ``dK``, ``dV`` and, where the problem has them, ``dBias`` and ``dSink``; ``dScale`` where
        the kernel returns it."""
        return self._measure_gradients(self.gradients, self.backward_bound)

    def _measure_gradients(self, gradients: dict[str, Tensor], bound: BackwardBound) -> dict[str, Measured]:
        out = {}
        for name in self.gradient_shapes:
            everything = torch.ones(gradients[name].shape, dtype=torch.bool)
            out[GRADIENTS[name]] = measure(GRADIENTS[name], gradients[name], bound.tensors[name], everything)
        return out

    @cached_property
    def own_forward(self) -> tuple[Tensor, Tensor] | None:
        """The kernel's own O and LSE as its backward gets them; None where it has no finite ones, or reads
        none (an eager backward keeps its own P)."""
        result = self.result
        if result.lse is None or self.rules.arithmetic.keeps_probabilities:
            return None
        finite = torch.isfinite(result.lse) | (result.lse == -torch.inf)
        if not (bool(torch.isfinite(result.out.double()).all()) and bool(finite.all())):
            return None
        return result.out, result.lse

    @cached_property
    def own_gradients(self) -> dict[str, Tensor]:
        """The gradients that the kernel's backward makes of its own forward."""
        assert self.own_forward is not None
        return self.run_backward(*self.own_forward)

    def measure_own(self, *, end_to_end: bool) -> dict[str, Measured]:
        """``own_gradients`` measured against the exact ones: given that same forward, or ``end_to_end``
        from scratch, with the bounds of the forward's errors carried through (THEORY.md 4.4)."""
        given = self.own_forward
        assert given is not None
        gradients, rules, problem = self.own_gradients, self.rules, self.gradient_problem
        forward, out, lse = self.exact, self.bound.out.interval, self.bound.lse.interval
        inherited = Given(forward.out, forward.lse, lse.bound, out.bound)
        conditional = None if end_to_end else given

        def bound_of(exact: BackwardQuantities) -> BackwardBound:
            stored = inherited if end_to_end else Given(*given)
            with self._blame("bound"):
                return backward_bound(
                    problem,
                    forward,
                    exact,
                    stored,
                    rules.arithmetic,
                    rules.machine,
                    self.bound.scores,
                    with_scale=self._with_scale,
                )

        with self._blame("oracle"):
            low = fp64.backward(problem, *(conditional or ()))
            reference = backward_reference(problem, forward, low, bound_of, gradients, conditional)
        return self._measure_gradients(gradients, reference.bound)


GRADIENTS = {"dq": "dQ", "dk": "dK", "dv": "dV", "dbias": "dBias", "dsink": "dSink", "dscale": "dScale"}
"""The names that reports use for a backward's results."""


def on_device(problem: Problem, device: torch.device) -> Problem:
    """The problem with every tensor on ``device``; strides of moved tensors are torch's choice."""
    if problem.q.device == device or (device.type == "cpu" and problem.q.device.type == "cpu"):
        return problem
    moved = {
        f.name: value.to(device)
        for f in fields(problem)
        if isinstance(value := getattr(problem, f.name), Tensor)
    }
    return problem.replaced(**moved)
