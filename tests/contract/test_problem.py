"""Every illegal argument gets an error that names it."""

from __future__ import annotations

import math

import pytest
import torch

from flashcheck.arithmetic import Accumulator, Arithmetic, arithmetic_from, flash
from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.formats import BF16, FP16, format_named, format_of
from flashcheck.kernel import Capabilities, as_kernel
from flashcheck.problem import Problem


def tensors(**changes: object) -> dict[str, object]:
    """A legal problem with some arguments changed: batch 2, heads 4 over 2, Nq 3, Nk 5, dims 8 and 6."""
    legal: dict[str, object] = {
        "q": torch.zeros(2, 4, 3, 8),
        "k": torch.zeros(2, 2, 5, 8),
        "v": torch.zeros(2, 2, 5, 6),
    }
    return legal | changes


PACKED = {"q": torch.zeros(1, 4, 3, 8), "k": torch.zeros(1, 2, 5, 8), "v": torch.zeros(1, 2, 5, 6)}

ILLEGAL: dict[str, tuple[dict[str, object], str]] = {
    "q no tensor": ({"q": [1.0]}, "q"),
    "q rank": ({"q": torch.zeros(4, 3, 8)}, "q"),
    "v rank": ({"v": torch.zeros(2, 5, 6)}, "v"),
    "integers": ({n: torch.zeros(2, 2, 5, 8, dtype=torch.int32) for n in "qkv"}, "dtype"),
    "k dtype": ({"k": torch.zeros(2, 2, 5, 8, dtype=torch.float16)}, "k.dtype"),
    "v batch": ({"v": torch.zeros(3, 2, 5, 6)}, "v.shape[0]"),
    "v length": ({"v": torch.zeros(2, 2, 4, 6)}, "v.shape"),
    "k dim": ({"k": torch.zeros(2, 2, 5, 7)}, "k.shape[3]"),
    "head dim 0": ({"q": torch.zeros(2, 4, 3, 0), "k": torch.zeros(2, 2, 5, 0)}, "q.shape[3]"),
    "value dim 0": ({"v": torch.zeros(2, 2, 5, 0)}, "v.shape[3]"),
    "heads": ({"q": torch.zeros(2, 3, 3, 8)}, "q.shape[1]"),
    "scale": ({"scale": math.inf}, "scale"),
    "scale nan": ({"scale": math.nan}, "scale"),
    "softcap 0": ({"softcap": 0.0}, "softcap"),
    "softcap inf": ({"softcap": math.inf}, "softcap"),
    "descale": ({"q_descale": 0.0}, "q_descale"),
    "descale nan": ({"v_descale": math.nan}, "v_descale"),
    "causal": ({"causal": True}, "causal"),
    "causal name": ({"causal": "lower_right"}, "causal"),
    "window kind": ({"window": 3}, "window"),
    "window negative": ({"window": (-1, 0)}, "window left"),
    "window right": ({"window": (0, -2)}, "window right"),
    "mask dtype": ({"mask": torch.zeros(1, 1, 3, 5)}, "mask.dtype"),
    "mask shape": ({"mask": torch.ones(1, 1, 3, 4, dtype=torch.bool)}, "mask.shape"),
    "mask rank": ({"mask": torch.ones(3, 5, dtype=torch.bool)}, "mask.shape"),
    "bias dtype": ({"bias": torch.ones(1, 1, 3, 5, dtype=torch.int64)}, "bias.dtype"),
    "bias shape": ({"bias": torch.ones(1, 2, 3, 5)}, "bias.shape"),
    "sink": ({"sink": torch.zeros(3)}, "sink.shape"),
    "alibi": ({"alibi_slopes": torch.zeros(2)}, "alibi_slopes.shape"),
    "lengths dtype": ({"key_lengths": torch.ones(2)}, "key_lengths"),
    "lengths shape": ({"key_lengths": torch.ones(3, dtype=torch.int64)}, "key_lengths"),
    "lengths range": ({"key_lengths": torch.tensor([1, 6])}, "key_lengths"),
    "lengths negative": ({"key_lengths": torch.tensor([1, -1])}, "key_lengths"),
    "one cu_seqlens": ({**PACKED, "cu_seqlens_q": torch.tensor([0, 3])}, "cu_seqlens_q"),
    "packed batch": (
        {"cu_seqlens_q": torch.tensor([0, 3]), "cu_seqlens_k": torch.tensor([0, 5])},
        "cu_seqlens_q",
    ),
    "segments differ": (
        {**PACKED, "cu_seqlens_q": torch.tensor([0, 1, 3]), "cu_seqlens_k": torch.tensor([0, 5])},
        "cu_seqlens_k",
    ),
    "segments total": (
        {**PACKED, "cu_seqlens_q": torch.tensor([0, 2]), "cu_seqlens_k": torch.tensor([0, 5])},
        "cu_seqlens_q",
    ),
    "segments fall": (
        {**PACKED, "cu_seqlens_q": torch.tensor([0, 2, 1, 3]), "cu_seqlens_k": torch.tensor([0, 1, 2, 5])},
        "cu_seqlens_q",
    ),
    "dout": ({"dout": torch.zeros(2, 4, 3, 8)}, "dout.shape"),
    "dlse": ({"dlse": torch.zeros(2, 4, 5)}, "dlse.shape"),
}


@pytest.mark.parametrize("case", list(ILLEGAL))
def test_illegal_arguments_are_named(case: str) -> None:
    changes, argument = ILLEGAL[case]
    with pytest.raises(ArgumentError) as caught:
        Problem(**tensors(**changes))  # type: ignore[arg-type]
    assert argument in caught.value.argument
    assert str(caught.value).startswith(caught.value.argument)
    assert "expected" in str(caught.value)


LEGAL: dict[str, dict[str, object]] = {
    "plain": {},
    "negative scale": {"scale": -2.0},
    "zero scale": {"scale": 0.0},
    "no queries": {"q": torch.zeros(2, 4, 0, 8)},
    "no keys": {"k": torch.zeros(2, 2, 0, 8), "v": torch.zeros(2, 2, 0, 6)},
    "no batch": {"q": torch.zeros(0, 4, 3, 8), "k": torch.zeros(0, 2, 5, 8), "v": torch.zeros(0, 2, 5, 6)},
    "broadcast mask": {"mask": torch.ones(1, 1, 1, 5, dtype=torch.bool)},
    "open window": {"window": (None, 0)},
    "empty length": {"key_lengths": torch.tensor([0, 5])},
    "slopes per batch": {"alibi_slopes": torch.zeros(2, 4)},
    "gradients": {"dout": torch.zeros(2, 4, 3, 6), "dlse": torch.zeros(2, 4, 3)},
}


@pytest.mark.parametrize("case", list(LEGAL))
def test_legal_arguments_are_taken(case: str) -> None:
    problem = Problem(**tensors(**LEGAL[case]))  # type: ignore[arg-type]
    assert problem.visible().shape == (problem.batch, 4, problem.num_queries, problem.num_keys)
    assert problem.describe()


def test_effective_scale_folds_the_descales() -> None:
    problem = Problem(**tensors(scale=0.5, q_descale=2.0, k_descale=4.0))  # type: ignore[arg-type]
    assert problem.effective_scale == 4.0
    assert Problem(**tensors()).effective_scale == 1 / math.sqrt(8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"order": "sideways"}, "Arithmetic.order"),
        ({"row_sum": "half"}, "Arithmetic.row_sum"),
        ({"normalise": "never"}, "Arithmetic.normalise"),
        ({"scale_placement": "output"}, "Arithmetic.scale_placement"),
        ({"score_scale": 0.0}, "Arithmetic.score_scale"),
        ({"probability_scale": math.inf}, "Arithmetic.probability_scale"),
        (
            {"probability_scale": 448.0, "probability_scale_placement": "exponent"},
            "Arithmetic.probability_scale",
        ),
        (
            {"probability_scale_placement": "exponent", "scale_placement": "scores"},
            "Arithmetic.probability_scale_placement",
        ),
        ({"probability_scale_placement": "sum"}, "Arithmetic.probability_scale_placement"),
        ({"block_keys": 0}, "Arithmetic.block_keys"),
        ({"scale_roundings": -1}, "Arithmetic.scale_roundings"),
        ({"splits": 0}, "Arithmetic.splits"),
        ({"rescale_threshold": 16.0}, "Arithmetic.rescale_threshold"),
        ({"exp_error": 0.5}, "Arithmetic.exp_error"),
    ],
)
def test_arithmetic_names_what_is_illegal(changes: dict[str, object], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        flash(BF16, **changes)
    assert caught.value.argument == argument


def test_arithmetic_from_plain_data() -> None:
    declared = {"input_format": "bf16", "output_format": "bf16", "probability_format": "fp16"}
    assert arithmetic_from(declared) == Arithmetic(BF16, BF16, FP16)
    assert arithmetic_from(flash(FP16).describe()) == flash(FP16)
    with pytest.raises(UnknownNameError, match=r"probability_formt.*did you mean probability_format"):
        arithmetic_from({**declared, "probability_formt": "fp16"})
    with pytest.raises(ArgumentError, match="required"):
        arithmetic_from({"input_format": "bf16"})
    with pytest.raises(UnknownNameError, match="fp17"):
        arithmetic_from({**declared, "input_format": "fp17"})


def test_accumulator_validates() -> None:
    with pytest.raises(ArgumentError, match=r"Accumulator\.block"):
        Accumulator(block=0)
    with pytest.raises(ArgumentError, match=r"Accumulator\.rounding"):
        Accumulator(rounding="up")  # type: ignore[arg-type]
    assert Accumulator().gamma(0) == 0.0
    assert Accumulator().gamma(100) >= 100 * 2.0**-24


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtypes": ("fp17",)}, "fp17"),
        ({"options": ("scal",)}, "did you mean scale"),
        ({"head_dim": (0, 4)}, "head_dim"),
        ({"not_together": (("causal", "nothing"),)}, "not_together"),
    ],
)
def test_capabilities_validate(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        Capabilities(**changes)  # type: ignore[arg-type]


def test_unknown_formats_are_named() -> None:
    with pytest.raises(UnknownNameError, match=r"bf61.*did you mean bf16"):
        format_named("bf61")
    with pytest.raises(UnknownNameError, match="dtype"):
        format_of(torch.int8)


def test_declarations_with_unknown_keys_are_refused() -> None:
    def attention() -> None: ...

    attention.__flashcheck__ = {"forwards": attention}  # type: ignore[attr-defined]
    with pytest.raises(UnknownNameError, match="did you mean forward"):
        as_kernel(attention, "attention")
    with pytest.raises(ArgumentError, match="KERNEL"):
        as_kernel(3, "three")
