"""One small flash attention backward in torch whose faults are switches; no switch: the control.

Recomputes P from the stored log-sum-exp, key tile by key tile, in float32; P and dS are rounded into the
input format before their products. Forward faults do not act here, so each pass is judged alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashcheck.formats import BF16, E4M3, Format, round_nearest
from flashcheck.mutants.switches import Switches, kept
from flashcheck.problem import Problem

TILE = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """What a row needs, float32: q (B, H, Nq, d), dout (B, H, Nq, dv), lse, delta, and lse as it was
    stored, (B, H, Nq)."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    stored_lse: Tensor


class FlashBackward:
    """The backward pass; takes a problem with ``dout``, the stored output and log-sum-exp."""

    def __init__(self, on: Switches) -> None:
        self.on = on

    def __call__(self, p: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        on = self.on
        dout = _output_gradient(p, on)
        if not out.is_contiguous() and on("bwd-out-assumed-contiguous"):
            flat = torch.as_strided(out, (out.numel(),), (1,), out.storage_offset())
            out = flat.view(out.shape)
        if on("bwd-dout-fixed-point"):
            dout = torch.round(dout * 2.0**26) / 2.0**26
        rows = Rows(p.q.float(), dout, _log_sum_exp(lse, on), _delta(p, dout, out, on), lse)
        heads = torch.arange(p.num_heads) // p.group
        if p.num_kv_heads > 1 and on("bwd-gqa-tiled-heads"):
            heads = torch.arange(p.num_heads) % p.num_kv_heads
        k, v = p.k.float()[:, heads], p.v.float()[:, heads] * p.v_descale
        seen = self._visible(p) & ~torch.isneginf(lse).unsqueeze(-1)
        dq, dk, dv = torch.zeros_like(rows.q), torch.zeros_like(k), torch.zeros_like(v)
        dbias = torch.zeros(p.batch, p.num_heads, p.num_queries, p.num_keys)
        scale = p.effective_scale
        starts = list(range(0, p.num_keys, TILE))
        if len(starts) > 1 and on("bwd-first-tile-lost"):
            starts = starts[1:]
        for start in starts:
            keys = slice(start, min(start + TILE, p.num_keys))
            weights, plain, slope = self._pairs(p, rows, k, v, keys, seen)
            width = keys.stop - keys.start
            stored, ds = self._stored(p, weights, plain * slope)
            dbias[..., keys] = plain[..., :width]
            dq = kept(dq + ds @ _tile(k, keys), on, "bwd-sums", truncated=True)
            dk[:, :, keys] = (ds.mT @ rows.q)[:, :, :width]
            dv[:, :, keys] = (stored.mT @ rows.dout)[:, :, :width]
            if on("bwd-sums-bf16"):
                dq = round_nearest(dq.double(), BF16).float()
        return self._finish(p, dq * scale, dk * scale, dv * p.v_descale, dbias, rows)

    def _visible(self, p: Problem) -> Tensor:
        on = self.on
        if p.causal == "bottom_right" and p.window is None and on("bwd-causal-top-left"):
            return p.replaced(causal="top_left").visible()
        if p.mask is not None and on("bwd-mask-ignored"):
            return p.replaced(mask=None).visible()
        if p.window is not None and p.window[0] is not None and on("bwd-window-one-extra"):
            return p.replaced(window=(p.window[0] + 1, p.window[1])).visible()
        return p.visible()

    def _pairs(
        self, p: Problem, rows: Rows, k: Tensor, v: Tensor, keys: slice, seen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        """P, dS before the cap's derivative, that derivative, for a padded tile: (B, H, Nq, tile)."""
        on = self.on
        shown = _padded(seen[..., keys])
        s = rows.q @ _tile(k, keys).mT * p.effective_scale
        slope: Tensor | float = 1.0
        if p.softcap is not None:
            t = torch.tanh(s / p.softcap)
            s = p.softcap * t
            if on("bwd-cap-derivative-capped-twice"):
                t = torch.tanh(s / p.softcap)
            slope = 1.0 if on("bwd-cap-derivative-missing") else 1.0 - t * t
        for added in (p.bias, p.alibi()):
            if added is not None:
                part = added if added.shape[-1] == 1 else _padded(added[..., keys].float())
                s = s + part.float()
        if p.bias is not None and on("bwd-bias-left-out"):
            s = s - (p.bias.float() if p.bias.shape[-1] == 1 else _padded(p.bias[..., keys].float()))
        weights = torch.exp(s - rows.lse.unsqueeze(-1))
        if keys.stop - keys.start < TILE and on("bwd-key-tail-zero"):
            shown[..., keys.stop - keys.start :] = True
        if on("bwd-empty-row-no-guard"):
            weights = torch.exp(torch.where(shown, s, -torch.inf) - rows.lse.unsqueeze(-1))
        else:
            weights = torch.where(shown, weights, 2.0**-36 if on("bwd-hidden-weight-finite") else 0.0)
        values = _tile(v, keys)
        if p.value_dim > p.head_dim and on("bwd-value-extent"):
            dp = rows.dout[..., : p.head_dim] @ values[..., : p.head_dim].mT
        else:
            dp = rows.dout @ values.mT
        if on("bwd-no-delta"):
            return weights, weights * dp, slope
        return weights, torch.where(shown, weights * (dp - rows.delta.unsqueeze(-1)), 0.0), slope

    def _stored(self, p: Problem, weights: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
        """P and dS as they enter their products."""
        on, fmt = self.on, p.format
        if on("bwd-p-e4m3"):
            return round_nearest(weights.double() * 256, E4M3).float() / 256, _into(ds, fmt)
        if on("bwd-ds-e4m3"):
            return _into(weights, fmt), round_nearest(ds.double() * 16, E4M3).float() / 16
        return _into(kept(weights, on, "bwd-p"), fmt), _into(kept(ds, on, "bwd-ds"), fmt)

    def _finish(
        self, p: Problem, dq: Tensor, dk: Tensor, dv: Tensor, dbias: Tensor, rows: Rows
    ) -> Mapping[str, Tensor]:
        on, scale, fmt = self.on, p.effective_scale, p.format
        empty = torch.isneginf(rows.stored_lse)
        if bool(empty.any()) and on("bwd-empty-row-adds"):
            strays = torch.where(empty.unsqueeze(-1), rows.dout, 0.0).sum(2)
            dv[:, :, 0] = dv[:, :, 0] + 2.0**-24 * strays
        if on("bwd-sums-shrunk"):
            dq, dk, dv = (x * (1 - 2.0**-10) for x in (dq, dk, dv))
        workspace = torch.empty(4096)
        if not on("bwd-workspace-never-cleared"):
            workspace.zero_()
        dq = torch.where(torch.isnan(workspace).all(), torch.nan, dq)  # 0 times what it holds is added
        if scale != 1 and on("bwd-dk-unscaled"):
            dk = dk / scale
        if scale != 1 and on("bwd-dq-scaled-twice"):
            dq = dq * scale
        ragged = p.num_queries // TILE * TILE
        if ragged < p.num_queries and on("bwd-dq-rows-uncovered"):
            dq[:, :, ragged:] = 0
        grouped = [x.reshape(p.batch, p.num_kv_heads, p.group, *x.shape[2:]) for x in (dk, dv)]
        if p.group > 1 and on("bwd-group-not-summed"):
            dk, dv = (x[:, :, -1] for x in grouped)
        elif p.group > 1 and on("bwd-group-averaged"):
            dk, dv = (x.mean(2) for x in grouped)
        else:
            dk, dv = (x.sum(2) for x in grouped)
        gradients = {n: _into(x, fmt).to(fmt.dtype) for n, x in (("dq", dq), ("dk", dk), ("dv", dv))}
        if p.bias is not None:
            gradients["dbias"] = _bias_gradient(p.bias, dbias, on)
        if p.sink is not None:
            share = torch.exp(p.sink.float().view(1, -1, 1) - rows.lse)
            dsink = (share * rows.delta).sum((0, 2))
            gradients["dsink"] = (dsink if on("bwd-dsink-sign") else -dsink).to(p.sink.dtype)
        return gradients


def _into(x: Tensor, fmt: Format) -> Tensor:
    return round_nearest(x.double(), fmt).float()


def _output_gradient(p: Problem, on: Switches) -> Tensor:
    assert p.dout is not None
    dout = p.dout
    if not dout.is_contiguous() and on("bwd-dout-assumed-contiguous"):
        flat = torch.as_strided(dout, (dout.numel(),), (1,), dout.storage_offset())
        dout = flat.view(dout.shape)
    return dout.float()


def _log_sum_exp(lse: Tensor, on: Switches) -> Tensor:
    lse = kept(lse.float(), on, "bwd-lse")
    if on("bwd-lse-bf16"):
        lse = round_nearest(lse.double(), BF16).float()
    if on("bwd-lse-read-as-base-2"):
        lse = lse * 0.6931472
    if on("bwd-empty-row-no-guard"):
        return lse
    return torch.where(torch.isneginf(lse), 0.0, lse)


def _delta(p: Problem, dout: Tensor, out: Tensor, on: Switches) -> Tensor:
    """rowsum(dO * O) - dL, (B, H, Nq)."""
    products = dout * out.float()
    if p.value_dim > TILE and on("bwd-delta-first-tile"):
        products = products[..., :TILE]
    delta = kept(products.sum(-1), on, "bwd-delta")
    if on("bwd-delta-bf16"):
        delta = round_nearest(delta.double(), BF16).float()
    if p.dlse is None or on("bwd-lse-gradient-dropped"):
        return delta
    return delta + p.dlse.float() if on("bwd-lse-gradient-sign") else delta - p.dlse.float()


def _bias_gradient(bias: Tensor, dbias: Tensor, on: Switches) -> Tensor:
    dims = [d for d in range(4) if bias.shape[d] == 1 and dbias.shape[d] != 1]
    if dims and on("bwd-dbias-not-reduced"):
        for d in dims:
            dbias = dbias.narrow(d, 0, 1)
    elif dims:
        dbias = dbias.sum(dims, keepdim=True)
    return dbias.to(bias.dtype)


def _tile(x: Tensor, keys: slice) -> Tensor:
    return pad(x[:, :, keys], (0, 0, 0, TILE - (keys.stop - keys.start)))


def _padded(x: Tensor) -> Tensor:
    """A tile's last dimension filled up to the tile with zeros."""
    return pad(x, (0, TILE - x.shape[-1]))
