"""Backward pass from the stored output and log-sum-exp: scores and P are recomputed tile by tile.

    P = exp(S - L), dP = dO V^T, delta = rowsum(dO * O) - dL, dS = P (dP - delta)
    dV = P^T dO, dQ = scale dS K, dK = scale dS^T Q

An arithmetic that keeps the forward's P (``backward_probability``; eager attention does) recomputes that P
instead and takes delta = rowsum(P dP), as automatic differentiation of a softmax does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.arithmetic import Arithmetic, Machine
from flashcheck.emulator import functions
from flashcheck.emulator.forward import eager_shares
from flashcheck.emulator.rounding import fp32, product_operand, round_to, stored
from flashcheck.emulator.scores import Scores, finite_reference
from flashcheck.emulator.tiles import key_tiles, ranges
from flashcheck.emulator.units import add_up, kept, multiply_add
from flashcheck.formats import Format, format_of
from flashcheck.kernel import GRADIENT_NAMES
from flashcheck.problem import Problem


def backward(
    problem: Problem, out: Tensor, lse: Tensor, arithmetic: Arithmetic, machine: Machine
) -> Mapping[str, Tensor]:
    """Gradients by name: dq, dk, dv, dscale, and dbias, dsink where the problem has a bias or a sink.

    Args:
        out: (B, H, Nq, dv) and lse: (B, H, Nq): what the forward stored; exact inputs here.
    """
    return _Backward(problem, out, lse, arithmetic, machine).run()


@dataclass(slots=True)
class _Sums:
    """Gradients while they are summed, float32: dq (B, H, Nq, d), dk and dv per *query* head, dbias;
    dscale (B, H, Nq), of every row."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dscale: Tensor


class _Backward:
    def __init__(
        self, problem: Problem, out: Tensor, lse: Tensor, arithmetic: Arithmetic, machine: Machine
    ) -> None:
        arithmetic, machine = arithmetic.in_backward, arithmetic.on(machine)
        self.problem, self.arithmetic, self.machine = problem, arithmetic, machine
        self.scores = Scores(problem, arithmetic, machine)
        self.eager = arithmetic.keeps_probabilities
        self.lse = lse.float()
        # A row that sees no key adds nothing, also where a sink makes its LSE finite (contract, point 4).
        self.alive = self.scores.weighs | (~torch.isneginf(self.lse) & self.scores.visible.any(-1))
        shape = (problem.batch, problem.num_heads, problem.num_queries, problem.value_dim)
        given = torch.zeros(shape) if problem.dout is None else problem.dout
        dout = given.float()
        values = problem.v.float().repeat_interleave(problem.group, 1)
        self.dout = product_operand(dout, arithmetic)
        # An output gradient wider than the inputs is multiplied as it is, and aligned as its own format.
        self.dout_format = arithmetic.product_format or format_of(given.dtype)
        self.v = product_operand(values, arithmetic)
        self.dlse = torch.zeros(shape[:3]) if problem.dlse is None else problem.dlse.float()
        # Rows and keys with NaN or inf must not meet the zeros of pairs that are hidden.
        operands = (problem.q, problem.k, problem.v, dout)
        self.all_finite = all(bool(torch.isfinite(x.float()).all()) for x in operands)
        # delta does not depend on the keys, so it is taken once, before the tiles.
        ones = torch.zeros(shape[:3])
        fmt = arithmetic.delta_format
        products = kept(kept(dout, machine) * kept(out.float(), machine), machine)
        delta = add_up(products if fmt is None else round_to(products, fmt), ones, machine.vector)
        self.delta = kept((delta if fmt is None else round_to(delta, fmt)) - self.dlse, machine)
        self.shares = eager_shares(self.scores) if self.eager else None
        if self.shares is not None:
            every = slice(0, problem.num_keys)
            dp = self._grad_probabilities(slice(None), every)
            products = torch.where(self.scores.visible, kept(self.shares * kept(dp, machine), machine), 0.0)
            self.delta = kept(add_up(products, ones, machine.vector) - self.dlse, machine)

    def run(self) -> Mapping[str, Tensor]:
        p, a = self.problem, self.arithmetic
        per_head = (p.batch, p.num_heads, p.num_keys)
        sums = _Sums(
            dq=torch.zeros(*p.q.shape),
            dk=torch.zeros(*per_head, p.head_dim),
            dv=torch.zeros(*per_head, p.value_dim),
            dbias=None if p.bias is None else torch.zeros(*per_head[:2], p.num_queries, p.num_keys),
            dscale=torch.zeros(*p.q.shape[:3]),
        )
        tiles = [keys for part in key_tiles(p.num_keys, a) for keys in part]
        for rows in ranges(p.num_queries, a.block_queries or 1):
            for keys in tiles:
                self._tile(sums, rows, keys)
        return self._stored(sums)

    def _tile(self, sums: _Sums, rows: slice, keys: slice) -> None:
        a = self.arithmetic
        seen = self.scores.visible[..., rows, keys] & self.alive[..., rows, None]
        tile = self.scores.tile(keys, rows)
        probabilities = torch.where(seen, self._probabilities(tile, rows, keys), 0.0)
        dp = kept(self._grad_probabilities(rows, keys), self.machine)
        difference = kept(dp - self.delta[..., rows, None], self.machine)
        p_stored = round_to(probabilities * fp32(a.probability_scale), a.probability_format)
        if a.grad_score_probability == "rounded":
            probabilities = p_stored / fp32(a.probability_scale)
        ds = torch.where(seen, kept(probabilities * difference, self.machine), 0.0)
        if sums.dbias is not None:
            sums.dbias[..., rows, keys] = ds
        slope = self.scores.cap_slope(keys, rows)
        if slope is not None:
            ds = torch.where(seen, kept(ds * kept(slope, self.machine), self.machine), 0.0)
        terms = torch.where(seen, ds * self.scores.bare_product(keys, rows), 0.0)
        sums.dscale[..., rows] = add_up(terms, sums.dscale[..., rows], self.machine.vector)
        p_format = a.product_format or a.probability_format
        s_format = a.product_format or a.grad_operand_format
        narrow = a.product_format or a.input_format
        ds_stored = round_to(ds, a.grad_score_format or a.probability_format)
        p_operand = product_operand(p_stored, a)
        if a.scaled_grad_score_format is not None:
            ds_stored = kept(ds_stored * fp32(self.problem.effective_scale), self.machine)
            ds_stored = round_to(ds_stored, a.scaled_grad_score_format)
        ds_operand = product_operand(ds_stored, a)
        q, k = self.scores.operands
        skip = None if self.all_finite else seen
        skip_t = None if skip is None else skip.mT
        dq_factor, dk_factor = self._factors
        dv_factor = 1 / fp32(a.probability_scale)
        dout = self.dout[..., rows, :]
        sums.dq[..., rows, :] = self._add(
            sums.dq[..., rows, :], ds_operand, k[..., keys, :], (s_format, narrow), skip, dq_factor
        )
        sums.dk[..., keys, :] = self._add(
            sums.dk[..., keys, :], ds_operand.mT, q[..., rows, :], (s_format, narrow), skip_t, dk_factor
        )
        sums.dv[..., keys, :] = self._add(
            sums.dv[..., keys, :], p_operand.mT, dout, (p_format, self.dout_format), skip_t, dv_factor
        )

    @property
    def _factors(self) -> tuple[float, float]:
        """What multiplies the sums for dQ and dK."""
        return (1.0, 1.0) if self.arithmetic.scaled_grad_score_format else self.scores.gradient_factors

    def _add(
        self,
        total: Tensor,
        a: Tensor,
        b: Tensor,
        formats: tuple[Format, Format],
        skip: Tensor | None,
        factor: float,
    ) -> Tensor:
        """total + a b; where totals are kept in a narrow format, ``factor`` is applied before each store."""
        fmt, other = formats
        unit = self.machine.accumulator(fmt)
        narrow = self.arithmetic.grad_accumulator_format
        if narrow is None:
            return multiply_add(a, b, kept(total, self.machine), unit, fmt, skip, other)
        partial = multiply_add(a, b, torch.zeros_like(total), unit, fmt, skip, other)
        return round_to(kept(total + kept(partial * factor, self.machine), self.machine), narrow)

    def _probabilities(self, tile: Tensor, rows: slice, keys: slice) -> Tensor:
        """exp(s - lse) by the kernel's exponential; or the forward's own P."""
        if self.shares is not None:
            return self.shares[..., rows, keys]
        # A row of scores that all overflowed has an LSE of -inf: its P is NaN, as its output was, not 0.
        return self.scores.weigh(self.scores.exponent_against_lse(tile, self.lse[..., rows]))

    def _grad_probabilities(self, rows: slice, keys: slice) -> Tensor:
        """dP = dO V^T, times the descale of V."""
        a = self.arithmetic
        fmt = a.product_format or a.input_format
        left, right = self.dout[..., rows, :], self.v[..., keys, :].mT
        start = torch.zeros(*left.shape[:-1], right.shape[-1])
        unit = self.machine.accumulator(fmt)
        dp = multiply_add(left, right, start, unit, self.dout_format, other=fmt)
        dp = dp * fp32(self.problem.v_descale)
        return dp if a.grad_probability_format is None else round_to(dp, a.grad_probability_format)

    def _stored(self, sums: _Sums) -> Mapping[str, Tensor]:
        a, p = self.arithmetic, self.problem
        dq_factor, dk_factor = self._factors
        dq, dk, dv = sums.dq, sums.dk, sums.dv
        if a.grad_accumulator_format is None:
            dq, dk, dv = (kept(x, self.machine) for x in (dq, dk, dv))
            dq, dk, dv = dq * dq_factor, dk * dk_factor, dv / fp32(a.probability_scale)
        dv = dv * fp32(p.v_descale)
        dq, dk, dv = (kept(x, self.machine) for x in (dq, dk, dv))
        gradients = {
            "dq": stored(dq, a.output_format),
            "dk": stored(self._sum_group(dk), a.output_format),
            "dv": stored(self._sum_group(dv), a.output_format),
        }
        if sums.dbias is not None:
            assert p.bias is not None
            gradients["dbias"] = stored(self._reduced(sums.dbias, p.bias), format_of(p.bias.dtype))
        if p.sink is not None:
            gradients["dsink"] = stored(self._sink_gradient(p.sink), format_of(p.sink.dtype))
        dscale = add_up(sums.dscale.flatten(), torch.zeros(()), self.machine.vector)
        gradients["dscale"] = dscale * fp32(p.q_descale * p.k_descale)
        return {name: gradients[name] for name in GRADIENT_NAMES if name in gradients}

    def _sum_group(self, per_head: Tensor) -> Tensor:
        """(B, H, ...) summed over the query heads of a group, in fp32."""
        fmt = self.arithmetic.group_grad_format
        if fmt is not None:
            per_head = round_to(per_head, fmt)
        batch, heads, length, dim = per_head.shape
        grouped = per_head.reshape(batch, heads // self.problem.group, self.problem.group, length, dim)
        total = grouped[:, :, 0]
        for member in range(1, self.problem.group):
            total = kept(kept(total, self.machine) + kept(grouped[:, :, member], self.machine), self.machine)
        return total

    def _reduced(self, dbias: Tensor, bias: Tensor) -> Tensor:
        """Summed over the dimensions along which the bias was broadcast."""
        dims = [d for d in range(4) if bias.shape[d] == 1 and dbias.shape[d] != 1]
        if not dims:
            return dbias
        kept = [d for d in range(4) if d not in dims]
        terms = dbias.permute(*kept, *dims).flatten(len(kept))
        total = add_up(terms, torch.zeros(terms.shape[:-1]), self.machine.vector)
        return total.reshape(bias.shape)

    def _sink_gradient(self, sink: Tensor) -> Tensor:
        """-sum over batches and rows of exp(sink - L) delta."""
        logit = sink.float().view(1, -1, 1)
        a = self.arithmetic
        share = functions.exponential(
            logit - finite_reference(self.lse),
            self.machine,
            base=torch.e,
            error=a.exp_error,
            flush=a.exp_flush,
            exact_at_zero=True,
        )
        terms = torch.where(self.alive, -share * self.delta, 0.0).permute(1, 0, 2).flatten(1)
        return add_up(terms, torch.zeros(terms.shape[0]), self.machine.vector)
