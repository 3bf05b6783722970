"""The ladder, backward: gradients accumulated over row blocks, each block on the lowest rung that does.

dq of a row depends on its block alone, so a dq that is not good enough lifts its block. dk and dv sum
over all rows, so they lift every block of their key head; dbias, dsink and dscale sum over heads too and
lift everything. A key head with NaN or inf in data that is visible stays in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashcheck.oracle import double_double, exact, fp64, own_error
from flashcheck.oracle.ladder import BLOCK_BYTES, ROUNDING, RUNGS, demand
from flashcheck.oracle.operands import operands
from flashcheck.oracle.own_error import BackwardError
from flashcheck.oracle.parts import finite_rows, heads_of, part, row_blocks
from flashcheck.oracle.quantities import BackwardQuantities
from flashcheck.oracle.unit import DOUBLE_DOUBLE, FP64, multiprecision
from flashcheck.problem import Problem

_EXTRA_BITS = 128
_EVERYTHING = 1 << 62  # one block
_PAIRS = ("probabilities", "grad_probabilities", "grad_scores")
_TOP = 4  # levels 2, 3 and 4 are the exact rung with 0, 128 and 256 bits more


@dataclass(frozen=True, slots=True)
class Gradients:
    """One tensor per gradient: values, proved or allowed errors; shapes as in ``BackwardQuantities``."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsink: Tensor | None
    dscale: Tensor

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of those that exist."""
        for name in ("dq", "dk", "dv", "dbias", "dsink", "dscale"):
            value = getattr(self, name)
            if value is not None:
                yield name, value


def like(problem: Problem, fill: float) -> Gradients:
    """Gradients of ``problem``'s shapes filled with one number: an allowed error of inf asks for nothing."""

    def full(shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, fill, dtype=torch.float64)

    return Gradients(
        dq=full(tuple(problem.q.shape)),
        dk=full(tuple(problem.k.shape)),
        dv=full(tuple(problem.v.shape)),
        dbias=None if problem.bias is None else full(tuple(problem.bias.shape)),
        dsink=None if problem.sink is None else full(tuple(problem.sink.shape)),
        dscale=full(()),
    )


@dataclass(frozen=True, slots=True)
class ServedBackward:
    """Gradients as the ladder serves them.

    Attributes:
        gradients: float64 values.
        errors: proved bounds on |served - exact|, roundings to float64 included.
        rung: (B, H, Nq) index into ``RUNGS`` of the rung that computed each row's contributions.
        resolved: False where even the last rung cannot prove what was demanded.
    """

    gradients: Gradients
    errors: Gradients
    rung: Tensor
    resolved: bool


def backward(
    problem: Problem,
    allowed: Gradients,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> ServedBackward:
    """Every gradient to 1/64 of its allowed error; ``out`` and ``lse`` as in ``fp64.backward``."""
    return _Climber(problem, allowed, out, lse, block_bytes).run()


def backward_quantities(
    problem: Problem, allowed: Gradients, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[BackwardQuantities, ServedBackward]:
    """``backward`` with the quantities that bounds need; memory quadratic in length.

    Probabilities, dP, dS and delta of a key head come from the rung that its gradients come from.
    """
    climber = _Climber(problem, allowed, out, lse, _EVERYTHING, keep=True)
    served = climber.run()
    return climber.quantities(served.gradients), served


@dataclass(slots=True)
class _Part:
    """The query heads of one key head of one batch, and how far their row blocks have climbed."""

    b: int
    kv: int
    heads: slice
    problem: Problem
    out: Tensor | None
    lse: Tensor | None
    blocks: list[Tensor]
    levels: list[int] = field(default_factory=list)
    can_climb: bool = True
    kept: dict[tuple[int, int], tuple[BackwardQuantities, BackwardError]] = field(default_factory=dict)


class _Climber:
    def __init__(
        self,
        problem: Problem,
        allowed: Gradients,
        out: Tensor | None,
        lse: Tensor | None,
        block_bytes: int,
        *,
        keep: bool = False,
    ) -> None:
        self.problem, self.allowed, self.keep = problem, allowed, keep
        self.parts: list[_Part] = []
        for b in range(problem.batch):
            for kv in range(problem.num_kv_heads):
                heads = heads_of(problem, kv)
                piece = part(problem, b, heads)
                blocks = list(row_blocks(problem, problem.group, block_bytes))
                self.parts.append(
                    _Part(
                        b=b,
                        kv=kv,
                        heads=heads,
                        problem=piece,
                        out=None if out is None else out[b : b + 1, heads],
                        lse=None if lse is None else lse[b : b + 1, heads],
                        blocks=blocks,
                        levels=[0] * len(blocks),
                        can_climb=all(_finite(piece, rows) for rows in blocks),
                    )
                )

    def run(self) -> ServedBackward:
        while True:
            values, errors, roundings = self.evaluate()
            good = {
                name: error <= demand(getattr(self.allowed, name), getattr(values, name))
                for name, error in errors.named()
            }
            if not self.lift(good):
                break
        served = {
            name: None if error is None else error + getattr(roundings, name)
            for name, error in ((n, getattr(errors, n)) for n in Gradients.__slots__)
        }
        return ServedBackward(
            gradients=values,
            errors=Gradients(**served),  # type: ignore[arg-type]
            rung=self.rungs(),
            resolved=all(bool(ok.all()) for ok in good.values()),
        )

    def evaluate(self) -> tuple[Gradients, Gradients, Gradients]:
        """Values, proved errors, and what float64 lost in rounding and adding up blocks."""
        totals = like(self.problem, 0.0), like(self.problem, 0.0), like(self.problem, 0.0)
        for piece in self.parts:
            for n, (rows, level) in enumerate(zip(piece.blocks, piece.levels, strict=True)):
                got, error = self.block(piece, n, rows, level)
                for name, value in totals[0].named():
                    index = self.index(piece, name, rows)
                    block = getattr(got, name).reshape(value[index].shape)
                    value[index] += block
                    getattr(totals[1], name)[index] += getattr(error, name).reshape(block.shape)
                    lost = ROUNDING * (block.abs() * (level > 0) + value[index].abs())
                    getattr(totals[2], name)[index] += lost
        return totals

    def block(
        self, piece: _Part, n: int, rows: Tensor, level: int
    ) -> tuple[BackwardQuantities, BackwardError]:
        """``_block``; kept for the next round only where the caller wants the quadratic quantities."""
        if not self.keep:
            return _block(piece, rows, level)
        if (n, level) not in piece.kept:
            piece.kept[n, level] = _block(piece, rows, level)
        return piece.kept[n, level]

    def quantities(self, gradients: Gradients) -> BackwardQuantities:
        """The kept blocks put together, with these gradients."""
        p = self.problem
        heads = (p.batch, p.num_heads, p.num_queries)
        pairs = {name: torch.zeros(*heads, p.num_keys, dtype=torch.float64) for name in _PAIRS}
        delta = torch.zeros(heads, dtype=torch.float64)
        for piece in self.parts:
            for n, (rows, level) in enumerate(zip(piece.blocks, piece.levels, strict=True)):
                got = piece.kept[n, level][0]
                span = slice(int(rows[0]), int(rows[-1]) + 1)
                delta[piece.b, piece.heads, span] = got.delta[0]
                for name, whole in pairs.items():
                    whole[piece.b, piece.heads, span] = getattr(got, name)[0]
        return BackwardQuantities(
            dq=gradients.dq,
            dk=gradients.dk,
            dv=gradients.dv,
            dbias=gradients.dbias,
            dsink=gradients.dsink,
            dscale=gradients.dscale,
            probabilities=pairs["probabilities"],
            grad_probabilities=pairs["grad_probabilities"],
            grad_scores=pairs["grad_scores"],
            delta=delta,
        )

    def index(self, piece: _Part, name: str, rows: Tensor) -> tuple[int | slice, ...]:
        """Where a block's gradient ``name`` adds into the whole problem's."""
        span = slice(int(rows[0]), int(rows[-1]) + 1)
        if name == "dq":
            return piece.b, piece.heads, span
        if name in ("dk", "dv"):
            return piece.b, piece.kv
        if name == "dsink":
            return (piece.heads,)
        if name == "dscale" or self.problem.bias is None:
            return ()
        wide = [n > 1 for n in self.problem.bias.shape]
        return (
            slice(piece.b, piece.b + 1) if wide[0] else slice(None),
            piece.heads if wide[1] else slice(None),
            span if wide[2] else slice(None),
        )

    def lift(self, good: dict[str, Tensor]) -> bool:
        """Raise the blocks that a gradient in need depends on; False when none can rise."""
        everything = not all(bool(good[name].all()) for name in ("dbias", "dsink", "dscale") if name in good)
        lifted = False
        for piece in self.parts:
            keys = not all(bool(good[name][piece.b, piece.kv].all()) for name in ("dk", "dv"))
            for n, rows in enumerate(piece.blocks):
                needed = everything or keys or not bool(good["dq"][piece.b, piece.heads][:, rows].all())
                if needed and piece.can_climb and piece.levels[n] < _TOP:
                    piece.levels[n] += 1
                    lifted = True
        return lifted

    def rungs(self) -> Tensor:
        shape = (self.problem.batch, self.problem.num_heads, self.problem.num_queries)
        rung = torch.zeros(shape, dtype=torch.int8)
        for piece in self.parts:
            for rows, level in zip(piece.blocks, piece.levels, strict=True):
                rung[piece.b, piece.heads, int(rows[0]) : int(rows[-1]) + 1] = min(level, len(RUNGS) - 1)
        return rung


def _finite(problem: Problem, rows: Tensor) -> bool:
    x = operands(problem, rows)
    return bool((finite_rows(problem, x) | ~x.alive).all())


def _block(piece: _Part, rows: Tensor, level: int) -> tuple[BackwardQuantities, BackwardError]:
    """What a row block adds to each gradient, and the proved error of that."""
    problem, out, lse = piece.problem, piece.out, piece.lse
    if level == 0:
        unit = FP64
        got = fp64.backward(problem, out, lse, rows)
        forward = fp64.forward(problem, rows)
    elif level == 1:
        unit = DOUBLE_DOUBLE
        passes = double_double.both(problem, out, lse, rows)
        forward, got = passes[0].rounded(), passes[1].rounded()
    else:
        bits = exact.working_bits(problem) + _EXTRA_BITS * (level - 2)
        unit = multiprecision(bits)
        got = exact.backward(problem, out, lse, rows=rows.tolist(), bits=bits).rounded(problem)
        forward = exact.forward_all(problem, rows.tolist(), bits=bits)
    error = own_error.backward_error(problem, forward, got, unit, out=out, lse=lse, rows=rows)
    return got, error
