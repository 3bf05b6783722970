"""Second rung: attention in double-double, about 106 bits, vectorised over batch, heads and rows.

The same formulas as ``fp64.py`` in ``Twofold`` numbers. Data must be finite where it is visible: the
ladder sends no other row here. Hidden data counts as zero.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flashcheck.oracle import twofold
from flashcheck.oracle.operands import Operands, by_head, by_kv_head, operands, stored_rows, without_hidden
from flashcheck.oracle.quantities import BackwardQuantities, ForwardQuantities
from flashcheck.oracle.twofold import Twofold
from flashcheck.problem import Problem


@dataclass(frozen=True, slots=True)
class TwofoldForward:
    """``ForwardQuantities`` with both halves of every value."""

    out: Twofold
    lse: Twofold
    products: Twofold
    scores: Twofold
    probabilities: Twofold
    row_max: Twofold
    row_sum: Twofold
    visible: Tensor

    def rounded(self) -> ForwardQuantities:
        """Rounded to float64: of a normalised pair, the high half."""
        return ForwardQuantities(**_high_halves(self))


@dataclass(frozen=True, slots=True)
class TwofoldBackward:
    """``BackwardQuantities`` with both halves of every value."""

    dq: Twofold
    dk: Twofold
    dv: Twofold
    dbias: Twofold | None
    dsink: Twofold | None
    dscale: Twofold
    probabilities: Twofold
    grad_probabilities: Twofold
    grad_scores: Twofold
    delta: Twofold

    def rounded(self) -> BackwardQuantities:
        """Rounded to float64: of a normalised pair, the high half."""
        return BackwardQuantities(**_high_halves(self))


def _high_halves(record: TwofoldForward | TwofoldBackward) -> dict[str, Tensor]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: x.hi if isinstance(x, Twofold) else x for name, x in values.items()}


def forward(problem: Problem, rows: Tensor | None = None) -> TwofoldForward:
    """Query rows ``rows`` (None: all) of every head."""
    x = without_hidden(problem, operands(problem, rows))
    return _forward(problem, x)[0]


def backward(
    problem: Problem,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    rows: Tensor | None = None,
) -> TwofoldBackward:
    """Gradients; ``out``, ``lse`` and ``rows`` as in ``fp64.backward``."""
    return both(problem, out, lse, rows)[1]


def both(
    problem: Problem,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[TwofoldForward, TwofoldBackward]:
    """``forward`` and ``backward``, whose forward it is."""
    x = without_hidden(problem, operands(problem, rows))
    out, lse = stored_rows(out, rows), stored_rows(lse, rows)
    exact, raw = _forward(problem, x)
    p, p_sink = _probabilities(x, exact, lse)
    stored = exact.out if out is None else Twofold.of(torch.where(x.alive[..., None], out, 0.0))
    v_descale = twofold.constant(problem.v_descale, x.q)
    scale = twofold.constant(problem.effective_scale, x.q)

    dp = _per_head(problem, twofold.matmul(by_kv_head(problem, x.dout), x.v.mT)) * v_descale
    delta = twofold.total(Twofold.of(x.dout) * stored, -1) - Twofold.of(x.dlse)
    delta = delta.where(x.alive)
    ds = (p * (dp - delta.map(lambda t: t.unsqueeze(-1)))).where(x.visible)
    dx = ds
    if problem.softcap is not None:
        dx = ds * twofold.sech2(exact.products / twofold.constant(problem.softcap, x.q))

    dx_rows = dx.map(lambda t: by_kv_head(problem, t))
    p_rows = p.map(lambda t: by_kv_head(problem, t))
    dscale = twofold.total((dx * raw).map(torch.flatten), 0) * twofold.constant(problem.q_descale, x.q)
    gradients = TwofoldBackward(
        dq=_per_head(problem, twofold.matmul(dx_rows, x.k)) * scale,
        dk=twofold.matmul(dx_rows.map(lambda t: t.mT), by_kv_head(problem, x.q)) * scale,
        dv=twofold.matmul(p_rows.map(lambda t: t.mT), by_kv_head(problem, x.dout)) * v_descale,
        dbias=None if x.bias is None else _reduce_like(ds, x.bias.shape),
        dsink=None if p_sink is None else -twofold.total(twofold.total(p_sink * delta, 2), 0),
        dscale=dscale * twofold.constant(problem.k_descale, x.q),
        probabilities=p,
        grad_probabilities=dp,
        grad_scores=ds,
        delta=delta,
    )
    return exact, gradients


def _per_head(problem: Problem, x: Twofold) -> Twofold:
    return x.map(lambda t: by_head(problem, t))


def _forward(problem: Problem, x: Operands) -> tuple[TwofoldForward, Twofold]:
    """The forward quantities, and q . k of the stored values."""
    raw = _per_head(problem, twofold.matmul(by_kv_head(problem, x.q), x.k.mT))
    products = raw * twofold.constant(problem.effective_scale, x.q)
    scores = products
    if problem.softcap is not None:
        cap = twofold.constant(problem.softcap, x.q)
        scores = twofold.tanh(products / cap) * cap
    if x.bias is not None:
        scores = scores + Twofold.of(x.bias.expand_as(x.visible))
    if x.slopes is not None and x.distance is not None:
        scores = scores + Twofold(*twofold.two_prod(x.slopes, x.distance)).map(
            lambda t: t.expand_as(x.visible)
        )

    m = _largest(scores, x)
    shift = m.where(m.hi > -torch.inf)
    w = twofold.exp(scores - shift.map(lambda t: t.unsqueeze(-1))).where(x.visible)
    l = twofold.total(w, -1)
    l = l if x.sink is None else l + twofold.exp(Twofold.of(x.sink.expand_as(shift.hi)) - shift)
    empty = l.hi == 0
    divisor = l.where(~empty, 1.0)
    p = w / divisor.map(lambda t: t.unsqueeze(-1))
    weighted = twofold.matmul(p.map(lambda t: by_kv_head(problem, t)), x.v)
    exact = TwofoldForward(
        out=_per_head(problem, weighted) * twofold.constant(problem.v_descale, x.q),
        lse=(shift + twofold.log(divisor)).where(~empty, -torch.inf),
        products=products,
        scores=scores.where(x.visible, -torch.inf),
        probabilities=p,
        row_max=m,
        row_sum=l,
        visible=x.visible,
    )
    return exact, raw


def _largest(scores: Twofold, x: Operands) -> Twofold:
    """The largest visible score and the sink, (B, H, R); both halves count, -inf where there is none."""
    hi = torch.where(x.visible, scores.hi, -torch.inf)
    lo = scores.lo
    if x.sink is not None:
        sink = x.sink.expand_as(x.dlse).unsqueeze(-1)
        hi, lo = torch.cat([hi, sink], -1), torch.cat([lo, torch.zeros_like(sink)], -1)
    if not hi.shape[-1]:
        return Twofold.of(torch.full_like(x.dlse, -torch.inf))
    top = hi.amax(-1)
    low = torch.where(hi == top.unsqueeze(-1), lo, -torch.inf).amax(-1)
    return Twofold(top, torch.where(top > -torch.inf, low, 0.0))


def _probabilities(x: Operands, exact: TwofoldForward, lse: Tensor | None) -> tuple[Twofold, Twofold | None]:
    """p (B, H, R, Nk) and the sink's probability (B, H, R) or None."""
    sink = None if x.sink is None else Twofold.of(x.sink.expand_as(x.dlse))
    if lse is None:
        p_sink = None if sink is None else twofold.exp(sink - exact.row_max) / exact.row_sum
        return exact.probabilities, p_sink
    stored = Twofold.of(torch.where(x.alive, lse, 0.0))
    open_scores = exact.scores.where(x.visible)  # -inf - LSE would be NaN in two parts
    p = twofold.exp(open_scores - stored.map(lambda t: t.unsqueeze(-1))).where(x.visible)
    return p, None if sink is None else twofold.exp(sink - stored).where(x.alive)


def _reduce_like(x: Twofold, shape: torch.Size) -> Twofold:
    """Sum over the dimensions that ``shape`` broadcasts."""
    for dim, (n, m) in enumerate(zip(shape, x.hi.shape, strict=True)):
        if n != m:
            x = twofold.total(x, dim).map(lambda t: t.unsqueeze(dim))  # noqa: B023
    return x
