"""Each term of THEORY.md is needed: a bound without it rejects an honest emulator.

A term is dropped by judging a run under an arithmetic or machine that lacks the rounding in question, or by
setting to zero the constant that the term is made of. ``also`` names terms that have to be dropped with it
because they pay for the same thing several times over in ordinary cases; the run has to lie inside the bound
without them. Terms that cannot be shown so stand in THEORY.md section 8 with the reason.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import pytest
import torch

from flashcheck.arithmetic import IEEE, IEEE_FP32, Accumulator, Arithmetic, Machine, flash
from flashcheck.bounds import forward, pairs, scores, weights
from flashcheck.formats import BF16, FP16, FP32
from tests.bounds.honest import margins, normal, problem

EXACT = Accumulator(precision=52)
COARSE = Accumulator(precision=8)
WIDE = replace(flash(BF16), output_format=FP32, probability_format=FP16, grad_score_format=FP16)
"""Q K^T and dO V^T take bf16 operands, P V and the gradients fp16: each unit can be spoiled alone."""


def machine(**units: Accumulator) -> Machine:
    vector = units.pop("vector", IEEE_FP32)
    rest = {name: units.get(name, IEEE_FP32) for name in ("bf16", "fp16", "fp32")}
    return replace(IEEE, accumulators=rest, vector=vector)


@dataclass(frozen=True)
class Case:
    """One term: what is run, what the judge assumes, which constants it zeroes, where it shows."""

    tensor: str
    arithmetic: Arithmetic = WIDE
    run: Machine = IEEE
    judge: dict[str, object] = field(default_factory=dict)
    model: Machine | None = None
    drop: tuple[tuple[object, str], ...] = ()
    also: tuple[tuple[object, str], ...] = ()
    options: dict[str, object] = field(default_factory=dict)


UNIT_OF_SCORES = (scores, "UNIT")
UNIT_OF_SUMS = ((weights, "UNIT"), (forward, "UNIT"))
LARGE_BIAS: dict[str, object] = {
    "sizes": (0.01, 1.0, 1.0),
    "lengths": (24, 4),
    "bias": 1e4 + 0.1 * normal((1, 1, 24, 4), 5).float(),
}

SMALL_SCORES: dict[str, object] = {"sizes": (0.01, 1.0, 1.0)}
LIFTED = flash(FP32, probability_scale=2.0**100, probability_scale_placement="exponent")
"""A lift far beyond any use, so that its rounding stands out."""

CASES = {
    "S1": Case("lse", run=machine(bf16=COARSE), model=machine(bf16=EXACT)),
    "S2": Case("lse", replace(WIDE, score_format=BF16), judge={"score_format": None}),
    "S5": Case("lse", run=replace(IEEE, tanh_error=2.0**-11), model=replace(IEEE, tanh_error=0.0),
               options={"softcap": 5.0}),
    "S6": Case("lse", drop=(UNIT_OF_SCORES,), also=UNIT_OF_SUMS, options=LARGE_BIAS),
    "S8": Case("lse", replace(WIDE, scaled_score_format=BF16), judge={"scaled_score_format": None}),
    "W5": Case("out", replace(WIDE, exp_error=2.0**-9), judge={"exp_error": None}),
    "W5 flush": Case("out", replace(WIDE, exp_flush=2.0**-5), judge={"exp_flush": None}),
    "W7": Case("lse", LIFTED, judge={"probability_scale_placement": "product"}, options=SMALL_SCORES),
    "W7, rounding of P": Case("out.C", replace(LIFTED, probability_format=BF16, block_keys=16),
                              judge={"probability_scale_placement": "product"}, options=SMALL_SCORES),
    "P1": Case("out", replace(WIDE, probability_format=BF16), judge={"probability_format": FP32}),
    "O1": Case("out", run=machine(vector=COARSE), model=machine(vector=EXACT)),
    "O2": Case("out", run=machine(fp16=COARSE), model=machine(fp16=EXACT)),
    "O4": Case("out", run=replace(IEEE, division_error=2.0**-9), model=IEEE),
    "L2": Case("lse", replace(WIDE, row_sum="rounded", probability_format=BF16),
               judge={"row_sum": "unrounded"}),
    "L3": Case("lse", run=replace(IEEE, log_absolute=2.0**-10), model=IEEE),
    "B1": Case("dv", replace(WIDE, backward_exp_error=2.0**-8), judge={"backward_exp_error": None}),
    "B2": Case("dv", replace(WIDE, probability_format=BF16), judge={"probability_format": FP32}),
    "B3": Case("dq", run=machine(bf16=COARSE), model=machine(bf16=EXACT)),
    "B4": Case("dk", run=replace(IEEE, tanh_error=2.0**-8), model=replace(IEEE, tanh_error=0.0),
               options={"softcap": 2.0}),
    "B3, delta stored": Case("dq", replace(WIDE, delta_format=BF16), judge={"delta_format": None}),
    "B4, rounded P": Case("dq", replace(WIDE, probability_format=BF16, grad_score_format=FP32,
                                        grad_score_probability="rounded"),
                          judge={"grad_score_probability": "unrounded"}),
    "B5": Case("dq", replace(WIDE, grad_score_format=BF16), judge={"grad_score_format": FP32}),
    "B3, dP stored": Case("dq", replace(WIDE, grad_probability_format=BF16),
                          judge={"grad_probability_format": None}),
    "B3, dP stored, eager": Case("dk", replace(WIDE, normalise="before_product", scale_placement="scores",
                                               grad_probability_format=BF16),
                                 judge={"grad_probability_format": None}),
    "B5, scaled": Case("dq", replace(WIDE, scaled_grad_score_format=BF16),
                       judge={"scaled_grad_score_format": None}),
    "G2": Case("dv", run=machine(fp16=COARSE), model=machine(fp16=EXACT), options={"lengths": (200, 40)}),
    "G3": Case("dk", replace(WIDE, grad_accumulator_format=BF16, block_queries=16),
               judge={"grad_accumulator_format": None}),
    "G4": Case("dk", replace(WIDE, group_grad_format=BF16), judge={"group_grad_format": None},
               options={"heads": (4, 1)}),
    "C1": Case("dv.C", replace(WIDE, backward_exp_error=2.0**-10), judge={"backward_exp_error": None}),
    "C2": Case("out.C", replace(WIDE, block_keys=16, exp_error=2.0**-10), judge={"exp_error": None}),
    "C3": Case("out.C", run=machine(vector=COARSE), model=machine(vector=EXACT)),
}  # fmt: skip


def worst(case: Case, zeroed: tuple[tuple[object, str], ...], *, honest: bool, seed: int) -> float:
    declared = case.arithmetic if honest else replace(case.arithmetic, **case.judge)
    model = case.run if honest or case.model is None else case.model
    with ExitStack() as stack:
        for module, name in zeroed:
            stack.enter_context(patch.object(module, name, 0.0))
        options = {"lengths": (24, 80), **case.options}
        return margins(problem(seed=seed, **options), case.arithmetic, case.run, (declared, model))[
            case.tensor
        ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_honest_kernel_exceeds_the_bound_without_the_term(case):
    seeds = range(3)
    assert max(worst(case, case.also, honest=True, seed=s) for s in seeds) <= 1
    assert max(worst(case, case.also + case.drop, honest=False, seed=s) for s in seeds) > 1


END_TO_END = {
    "B6": ("lse_error", "dv.end", replace(WIDE, exp_error=2.0**-5, backward_exp_error=2.0**-20), IEEE, 2),
    "B7": ("out_error", "dq.end", WIDE, replace(IEEE, division_error=2.0**-5), 80),
}


@pytest.mark.parametrize(
    ("dropped", "tensor", "arithmetic", "model", "keys"), END_TO_END.values(), ids=END_TO_END
)
def test_end_to_end_needs_the_errors_of_the_forward(dropped, tensor, arithmetic, model, keys):
    """With a coarse forward, gradients leave a bound that forgets the error of LSE or of O."""
    problems = [problem(seed=s, lengths=(24, keys)) for s in range(3)]
    assert max(margins(p, arithmetic, model)[tensor] for p in problems) <= 1
    real = pairs.Given

    def forgetful(out, lse, lse_error=None, out_error=None):
        errors = {"lse_error": lse_error, "out_error": out_error}
        if lse_error is not None:
            errors[dropped] = torch.zeros_like(errors[dropped])
        return real(out, lse, **errors)

    with patch("tests.bounds.honest.Given", forgetful):
        assert max(margins(p, arithmetic, model)[tensor] for p in problems) > 1
