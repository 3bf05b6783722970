"""Faults that accuracy cannot see on the problem at hand: inside every bound, or asleep until a neighbour of
the problem is computed. Each is for one of the checks that compare runs."""

from __future__ import annotations

from collections.abc import Callable

from flashcheck.formats import BF16, FP32
from flashcheck.mutants import exposing as x
from flashcheck.mutants.registry import register
from flashcheck.problem import Problem


def _small_values() -> Problem:
    p = x.draw()
    return p.replaced(v=(p.v.float() / 16).to(p.v.dtype))


def _decreasing() -> Problem:
    """Scores that fall along the keys: the maximum stays in the first tile."""
    p = x.increasing()
    return p.replaced(k=p.k.flip(2))


def _empty_rows() -> Problem:
    return x.draw(FP32, lengths=(80, 48), causal="bottom_right")


def _fault(
    name: str,
    letter: str,
    fault: str,
    exposed_by: str,
    expose: Callable[[], Problem],
    check: str,
    source: str = "",
) -> None:
    register(name, letter, fault, exposed_by, expose, source=source, caught_by=check)


_fault(
    "hidden-score-finite",
    "L",
    "hidden keys score -24 instead of -inf: their weight is below every rounding",
    "values read off one by one",
    lambda: x.draw(lengths=(40, 40), causal="top_left"),
    "influence.forward",
    "pytorch#110213",
)
_fault(
    "hidden-key-in-max",
    "C",
    "the running maximum is taken before the mask, over keys that a row does not see",
    "another key behind the diagonal",
    lambda: x.draw(FP32, lengths=(40, 40), causal="top_left"),
    "influence.perturbed",
)
_fault(
    "hidden-value-in-max",
    "C",
    "the running maximum depends on the values of keys that a row does not see",
    "other values behind the diagonal",
    lambda: x.draw(FP32, lengths=(40, 40), causal="top_left"),
    "bitwise.suffix",
)
_fault(
    "order-by-head",
    "W",
    "odd heads sum their keys in another order",
    "heads permuted",
    lambda: x.draw(FP32, heads=(4, 4)),
    "bitwise.batch",
)
_fault(
    "order-by-ticket",
    "N",
    "a program takes its keys forwards or backwards by when it runs, not by what it computes",
    "programs launched in another order",
    lambda: x.draw(FP32, lengths=(70, 53)),
    "bitwise.orders",
)
_fault(
    "value-fixed-point",
    "P",
    "fp32 values pass through a grid of 2^-26",
    "V doubled",
    lambda: x.draw(FP32),
    "bitwise.scaling",
)
_fault(
    "bwd-dout-fixed-point",
    "P",
    "dO passes through a grid of 2^-26",
    "dO doubled",
    lambda: x.draw(FP32),
    "bitwise.gradient_scaling",
)
_fault(
    "no-rescale-in-last-tile",
    "B",
    "the output is not rescaled when the maximum moves in the last tile",
    "keys permuted; falling scores alone hide it",
    _decreasing,
    "relation.key_permutation",
)
_fault(
    "bias-clamped",
    "L",
    "the bias is clamped to +-8",
    "a constant added to a row",
    lambda: x.biased(heads=2, rows=37),
    "relation.logit_shift",
)
_fault(
    "value-range-clipped",
    "Y",
    "values are clipped to the range of a calibration",
    "V = 1; small values hide it",
    _small_values,
    "relation.unit_values",
)
_fault(
    "ungrouped-heads-reversed",
    "I",
    "without groups, query head h reads key head H - 1 - h",
    "the same heads written out",
    lambda: x.draw(heads=(4, 2)),
    "relation.repeated_heads",
)
_fault(
    "scale-absolute",
    "S",
    "the sign of the scale is lost",
    "signs of scale and q changed together",
    x.draw,
    "relation.scale_sign",
    "pytorch#105202",
)
_fault(
    "lse-of-single-tile",
    "T",
    "where all keys fit one tile the maximum is returned for the log-sum-exp",
    "a part of the keys that is one tile",
    lambda: x.draw().replaced(seed=9),  # the check splits after 10 keys
    "relation.split_merge",
)
_fault(
    "softcap-cached",
    "X",
    "the cap of the first call is used for all later ones",
    "calls with another cap in between",
    lambda: x.draw(softcap=1.0),
    "state.interleaved",
    "flashinfer#4014",
)
_fault(
    "illegal-accepted",
    "X",
    "arguments are not checked",
    "illegal arguments",
    lambda: x.draw(softcap=2.0),
    "option.illegal",
)
_fault(
    "workspace-never-cleared",
    "O",
    "an accumulator is not cleared, and 0 times what it held is added",
    "fresh memory full of NaN",
    x.draw,
    "isolation.unwritten",
    "vllm#47188",
)
_fault(
    "bwd-workspace-never-cleared",
    "O",
    "the accumulator of dQ is not cleared, and 0 times what it held is added",
    "fresh memory full of NaN",
    x.draw,
    "isolation.gradients_unwritten",
    "tilelang#2461",
)
_fault(
    "bwd-out-assumed-contiguous",
    "H",
    "the backward reads the stored output as if it were contiguous",
    "an output with gaps",
    x.draw,
    "isolation.backward",
    "flash-attention#355",
)
_fault(
    "offset-32-bits",
    "G",
    "head offsets are formed in 32 bits",
    "heads 2^31 elements apart",
    x.draw,
    "isolation.wide_strides",
    "fla#1080, flash-attention#2611, NATTEN#347",
)
_fault(
    "bwd-hidden-weight-finite",
    "C",
    "hidden pairs keep a weight of 2^-36 in dV",
    "dO one row at a time",
    lambda: x.draw(lengths=(53, 53), causal="top_left"),
    "influence.backward",
)
_fault(
    "bwd-empty-row-adds",
    "A",
    "a row that sees no key adds its dO, times 2^-24, to the first key",
    "another dO in such rows",
    _empty_rows,
    "special.empty_rows_backward",
    "burn#4694",
)
_fault(
    "reciprocal-short",
    "P",
    "the reciprocal of the row sum has 11 bits, cut short",
    "bf16, the mean error over many rows",
    lambda: x.draw(BF16, lengths=(128, 128), dims=(64, 64), heads=(4, 4)),
    "forward.bias",
)
_fault(
    "bwd-sums-shrunk",
    "P",
    "a factor of the gradients has 10 bits, cut short",
    "bf16, the mean error over many rows",
    lambda: x.draw(BF16, lengths=(128, 128), dims=(64, 64), heads=(4, 4)),
    "backward.bias",
)
