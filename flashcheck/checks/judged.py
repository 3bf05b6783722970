"""One problem, judged once: the kernel's result, the oracle's and the bound, shared by all checks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.bounds.forward import forward_bound
from flashcheck.bounds.result import ForwardBound
from flashcheck.checks.measure import Measured, measure
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.oracle import fp64
from flashcheck.oracle.quantities import ForwardQuantities
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

        Raises KernelError where the kernel raised or returned something of another shape.
        """
        problem = self.problem if problem is None else problem
        moved = on_device(problem, self.device)
        try:
            result = self.kernel.forward(moved)
            out = result.out.detach().cpu()
            lse = None if result.lse is None else result.lse.detach().cpu()
        except Exception as error:
            raise KernelError(f"the kernel raised {type(error).__name__}: {error}") from error
        self._validate(problem, out, lse)
        return ForwardResult(out, lse)

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
        """Declared arithmetic and machine for this problem on this device."""
        probe = self.problem if self.device.type == "cpu" else on_device(self.problem, self.device)
        return Rules(self.kernel.arithmetic(probe), self.kernel.machine(self.device))

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
    def exact(self) -> ForwardQuantities:
        try:
            return fp64.forward(self.problem)
        except Exception as error:
            raise JudgeError(
                f"the oracle failed on {self.problem.describe()}: {type(error).__name__}: {error}"
            ) from error

    @cached_property
    def bound(self) -> ForwardBound:
        try:
            return forward_bound(self.problem, self.exact, self.rules.arithmetic, self.rules.machine)
        except JudgeError:
            raise
        except Exception as error:
            raise JudgeError(
                f"the bound failed on {self.problem.describe()}: {type(error).__name__}: {error}"
            ) from error

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
