"""The float64 rung against the mpmath definition, autograd, finite differences and the contract."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from flashcheck.oracle import exact, fp64
from flashcheck.problem import Problem
from tests.oracle.problems import random_problem

SEEDS = range(120)

# A dozen roundings in a row, each 2^-53 relative to the magnitudes it handles, which are below 2^6 on
# these problems (at most 7 keys of 4 dimensions, entries of a few units, six additive terms): 2^-44.
# A wrong sign, factor or missing term shows at 1e-2 and up.
ROUNDINGS = 2.0**-44


def agree(got: Tensor | None, expected: Tensor | None, name: str) -> None:
    if got is None or expected is None:
        assert got is expected, name
        return
    assert got.shape == expected.shape, (name, got.shape, expected.shape)
    assert got.dtype == torch.float64, name
    magnitude = 1.0 + expected[torch.isfinite(expected)].abs().sum()
    same = (got == expected) | ((got - expected).abs() <= ROUNDINGS * magnitude)
    assert bool(same.all()), (name, got[~same], expected[~same])


def all_agree(got: object, expected: object) -> None:
    for field in dataclasses.fields(got):  # type: ignore[arg-type]
        agree_field(getattr(got, field.name), getattr(expected, field.name), field.name)


def agree_field(got: Tensor | None, expected: Tensor | None, name: str) -> None:
    if got is not None and got.dtype == torch.bool:
        assert expected is not None
        assert bool((got == expected).all()), name
    else:
        agree(got, expected, name)


@pytest.mark.parametrize("seed", SEEDS)
def test_forward_agrees_with_mpmath(seed: int) -> None:
    problem = random_problem(seed)
    all_agree(fp64.forward(problem), exact.forward_all(problem))


@pytest.mark.parametrize("seed", SEEDS)
def test_backward_agrees_with_mpmath(seed: int) -> None:
    problem = random_problem(seed)
    got, expected = fp64.backward(problem), exact.backward(problem).rounded(problem)
    expected = dataclasses.replace(expected, grad_probabilities=got.grad_probabilities)
    all_agree(got, expected)  # dP of hidden pairs is defined in one rung only


@pytest.mark.parametrize("seed", SEEDS[:60])
def test_conditional_backward_reads_the_stored_values(seed: int) -> None:
    problem = random_problem(seed)
    full = fp64.forward(problem)
    generator = torch.Generator().manual_seed(seed)
    out = full.out + torch.randn(full.out.shape, generator=generator, dtype=torch.float64) / 4
    lse = full.lse + torch.randn(full.lse.shape, generator=generator, dtype=torch.float64) / 4
    got = fp64.backward(problem, out, lse)
    expected = exact.backward(problem, out, lse).rounded(problem)
    agree(got.delta, expected.delta, "delta")
    for name in ("dq", "dk", "dv", "dbias", "dsink", "dscale", "probabilities"):
        agree(getattr(got, name), getattr(expected, name), name)


def test_seeds_cover_every_option() -> None:
    problems = [random_problem(seed) for seed in SEEDS]
    used = {name for problem in problems for name in problem.options()}
    assert {"scale", "causal", "window", "mask", "bias", "alibi_slopes", "softcap", "sink"} <= used
    assert {"key_lengths", "cu_seqlens"} <= used
    assert any(p.dlse is not None for p in problems)
    assert any(p.group > 1 and p.num_kv_heads > 1 for p in problems)
    assert any(p.group != p.num_kv_heads for p in problems)
    assert {p.scale for p in problems} >= {None, 0.0, -0.4}
    assert any(p.num_keys == 0 < p.num_queries for p in problems)
    assert any(p.num_queries == 0 < p.num_keys for p in problems)
    assert any(not bool(p.visible().any(-1).all()) and p.sink is not None for p in problems)


def differentiable(problem: Problem) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective sum(O dO) + sum(LSE dLSE) in plain torch, and its leaves.

    Naive softmax over the dense mask, written with index gymnastics of its own; rows that see no key
    are left out of both sums.
    """
    leaves = {name: getattr(problem, name).double().requires_grad_() for name in ("q", "k", "v")}
    for name in ("bias", "sink"):
        if getattr(problem, name) is not None:
            leaves[name] = getattr(problem, name).double().requires_grad_()
    scale = 1 / math.sqrt(problem.head_dim) if problem.scale is None else problem.scale
    leaves["scale"] = torch.tensor(scale, dtype=torch.float64, requires_grad=True)

    k = leaves["k"].repeat_interleave(problem.group, 1)
    v = leaves["v"].repeat_interleave(problem.group, 1) * problem.v_descale
    s = torch.einsum("bhid,bhjd->bhij", leaves["q"], k) * (problem.q_descale * problem.k_descale)
    s = s * leaves["scale"]
    if problem.softcap is not None:
        s = torch.tanh(s / problem.softcap) * problem.softcap
    if problem.bias is not None:
        s = s + leaves["bias"]
    alibi = problem.alibi()
    s = s if alibi is None else s + alibi
    visible = problem.visible()
    s = s.masked_fill(~visible, -torch.inf)
    if problem.sink is not None:
        s = torch.cat([s, leaves["sink"].view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    alive = visible.any(-1)
    s = torch.where(alive.unsqueeze(-1), s, 0.0)
    out = torch.softmax(s, -1)[..., : problem.num_keys] @ v
    assert problem.dout is not None
    objective = (out * problem.dout.double())[alive].sum()
    if problem.dlse is not None:
        objective = objective + (torch.logsumexp(s, -1) * problem.dlse)[alive].sum()
    return objective, leaves


@pytest.mark.parametrize("seed", [s for s in SEEDS if random_problem(s).num_keys])
def test_backward_agrees_with_autograd(seed: int) -> None:
    problem = random_problem(seed)
    objective, leaves = differentiable(problem)
    if not objective.requires_grad:
        pytest.skip("no row sees a key")
    gradients = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
    got = fp64.backward(problem)
    for name, expected in zip(leaves, gradients, strict=True):
        leaf = leaves[name]
        agree(getattr(got, f"d{name}"), torch.zeros_like(leaf) if expected is None else expected, name)


def objective_of(problem: Problem) -> float:
    """sum(O dO) + sum(LSE dLSE) by the forward rung, over rows that see a key."""
    full = fp64.forward(problem)
    assert problem.dout is not None
    alive = full.visible.any(-1)
    total = (full.out * problem.dout.double())[alive].sum()
    if problem.dlse is not None:
        total = total + (full.lse * problem.dlse)[alive].sum()
    return float(total)


@pytest.mark.parametrize("seed", SEEDS[:40])
def test_dscale_agrees_with_finite_differences(seed: int) -> None:
    # Central differences: error h^2 f''' / 6 + 2^-53 |f| / h with h = 2^-17: about 2^-30 either way
    # for derivatives below 2^8; a missing softcap slope or descale factor shows at 1e-2.
    problem = random_problem(seed)
    scale = 1 / math.sqrt(problem.head_dim) if problem.scale is None else problem.scale
    h = 2.0**-17
    ends = [objective_of(problem.replaced(scale=scale + sign * h)) for sign in (1, -1)]
    got = float(fp64.backward(problem).dscale)
    assert abs((ends[0] - ends[1]) / (2 * h) - got) <= 2.0**-22 * (1 + abs(got))


def test_gradients_through_a_biting_softcap_agree_with_finite_differences() -> None:
    problem = random_problem(3).replaced(softcap=0.5)
    base = dict(mask=None, key_lengths=None, causal=None, window=None)
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, 1, 5, 3, generator=generator, dtype=torch.float64) for _ in range(4))
    problem = Problem(q=q, k=k, v=v, softcap=0.5, scale=1.0, dout=dout, **base)  # type: ignore[arg-type]
    got, h = fp64.backward(problem), 2.0**-17
    for name in ("q", "k"):
        for index in ((0, 0, 1, 2), (0, 0, 4, 0)):
            values = []
            for sign in (1, -1):
                moved = getattr(problem, name).clone()
                moved[index] += sign * h
                values.append(objective_of(problem.replaced(**{name: moved})))
            slope = (values[0] - values[1]) / (2 * h)
            assert abs(slope - float(getattr(got, f"d{name}")[index])) <= 2.0**-22


def test_rows_select_rows() -> None:
    for seed in SEEDS[:40]:
        problem = random_problem(seed)
        if problem.num_queries < 2:
            continue
        rows = torch.tensor([problem.num_queries - 1, 0])
        some, full = fp64.forward(problem, rows), fp64.forward(problem)
        for name in ("out", "lse", "products", "scores", "probabilities", "row_max", "row_sum"):
            agree(getattr(some, name), getattr(full, name)[:, :, rows], name)


class TestEmptyRows:
    def problem(self, sink: bool) -> Problem:
        generator = torch.Generator().manual_seed(0)
        q, k, v, dout = (torch.randn(1, 2, 6, 4, generator=generator, dtype=torch.float64) for _ in range(4))
        return Problem(
            q=q,
            k=k[:, :, :3],
            v=v[:, :, :3],
            causal="bottom_right",  # the first three of six rows see none of the three keys
            sink=torch.tensor([0.5, -2.0]) if sink else None,
            dout=dout,
            dlse=torch.ones(1, 2, 6),
        )

    def test_out_is_zero_and_lse_minus_infinity(self) -> None:
        got = fp64.forward(self.problem(sink=False))
        assert bool((got.out[:, :, :3] == 0).all())
        assert bool((got.lse[:, :, :3] == -torch.inf).all())
        assert bool((got.row_max[:, :, :3] == -torch.inf).all())
        assert bool((got.row_sum[:, :, :3] == 0).all())
        assert bool(torch.isfinite(got.lse[:, :, 3:]).all())

    def test_lse_is_the_sink(self) -> None:
        got = fp64.forward(self.problem(sink=True))
        assert bool((got.out[:, :, :3] == 0).all())
        assert got.lse[0, :, 0].tolist() == [0.5, -2.0]

    def test_they_add_nothing_to_any_gradient(self) -> None:
        problem = self.problem(sink=True)
        assert problem.dout is not None
        poisoned = problem.dout.clone()
        poisoned[:, :, :3] = torch.nan
        got, expected = fp64.backward(problem.replaced(dout=poisoned)), fp64.backward(problem)
        all_agree(got, dataclasses.replace(expected, grad_probabilities=got.grad_probabilities))
        assert bool((got.dq[:, :, :3] == 0).all())

    def test_stored_garbage_in_them_is_not_read(self) -> None:
        problem = self.problem(sink=False)
        full = fp64.forward(problem)
        out, lse = full.out.clone(), full.lse.clone()
        out[:, :, :3], lse[:, :, :3] = torch.nan, torch.nan
        all_agree(fp64.backward(problem, out, lse), fp64.backward(problem, full.out, full.lse))


class TestPoison:
    def problem(self, k: Tensor, v: Tensor, **options: object) -> Problem:
        generator = torch.Generator().manual_seed(5)
        q, dout = (torch.randn(2, 4, 5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
        return Problem(q=q, k=k, v=v, dout=dout, **options)  # type: ignore[arg-type]

    def keys(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(6)
        k, v = (torch.randn(2, 2, 6, 3, generator=generator, dtype=torch.float64) for _ in range(2))
        return k, v

    @pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
    def test_padding_does_not_leak(self, poison: float) -> None:
        k, v = self.keys()
        clean_k, clean_v = k.clone(), v.clone()
        lengths = torch.tensor([4, 0])
        for b, n in enumerate(lengths.tolist()):
            k[b, :, n:] = v[b, :, n:] = poison
            clean_k[b, :, n:] = clean_v[b, :, n:] = 0.0
        dirty, clean = (
            self.problem(k, v, key_lengths=lengths),
            self.problem(clean_k, clean_v, key_lengths=lengths),
        )
        all_agree(fp64.forward(dirty), fp64.forward(clean))
        all_agree(fp64.backward(dirty), fp64.backward(clean))
        assert bool((fp64.backward(dirty).dv[1] == 0).all())

    def test_nan_reaches_the_rows_that_see_it_and_no_other(self) -> None:
        k, v = self.keys()
        v[0, 1, 2, 0] = torch.nan  # heads 2 and 3 of batch 0 read key head 1
        out = fp64.forward(self.problem(k, v, window=(0, 0))).out
        expected = torch.zeros(2, 4, 5, 3, dtype=torch.bool)
        expected[0, 2:, 1, 0] = True  # Nk - Nq = 1: row 1 is aligned with key 2
        assert bool((torch.isnan(out) == expected).all())

    def test_nan_key_poisons_its_row_and_spares_the_rest(self) -> None:
        k, v = self.keys()
        k[1, 0, 3, 1] = torch.nan
        full = fp64.forward(self.problem(k, v, window=(0, 0)))
        expected = torch.zeros(2, 4, 5, dtype=torch.bool)
        expected[1, :2, 2] = True
        assert bool((torch.isnan(full.lse) == expected).all())
        assert bool((torch.isnan(full.out).any(-1) == expected).all())

    def test_infinite_value_gives_an_infinite_output(self) -> None:
        k, v = self.keys()
        v[0, 0, 1, 2] = -torch.inf
        out = fp64.forward(self.problem(k, v)).out
        assert bool((out[0, :2, :, 2] == -torch.inf).all())
        assert bool(torch.isfinite(out[0, :2, :, :2]).all())

    def test_opposite_infinities_are_undefined(self) -> None:
        k, v = self.keys()
        v[0, 0, 1, 2], v[0, 0, 2, 2] = -torch.inf, torch.inf
        assert bool(torch.isnan(fp64.forward(self.problem(k, v)).out[0, :2, :, 2]).all())


def test_large_logits_stay_finite() -> None:
    q = torch.full((1, 1, 2, 4), 2.0**60, dtype=torch.float64)
    k = torch.tensor([1.0, 2.0, -1.0]).double().view(1, 1, 3, 1).expand(1, 1, 3, 4).contiguous()
    full = fp64.forward(Problem(q=q, k=k, v=k.clone()))
    assert bool((full.out == 2.0).all())
    assert bool(torch.isfinite(full.lse).all())
