"""The forward faults."""

from __future__ import annotations

from typing import Any

import torch

from flashcheck.formats import BF16, FP16, FP32
from flashcheck.mutants import exposing as x
from flashcheck.mutants.registry import register

_LATE_ROWS: dict[str, Any] = {"lengths": (48, 80), "causal": "bottom_right"}
_EMPTY_ROWS: dict[str, Any] = {"lengths": (80, 48), "causal": "bottom_right"}

# The twelve of the first certificate.
register("scale-wrong", "S", "the scale is 3 % too large", "any input", lambda: x.draw(FP16, scale=1.0))
register(
    "lost-tile",
    "E",
    "the number of key tiles is rounded down, so a ragged last tile is never visited",
    "Nk not a multiple of the tile",
    lambda: x.draw(lengths=(5, 53)),
    source="FlagGems#3395, triton#1975",
)
register(
    "no-rescale",
    "B",
    "the output is not rescaled when the running maximum moves",
    "scores that grow along the keys",
    x.increasing,
)
register(
    "causal-one-extra",
    "C",
    "a row sees one key past the diagonal",
    "causal",
    lambda: x.draw(causal="top_left"),
    source="transformers#39408",
)
register(
    "causal-top-left",
    "C",
    "the offset Nk - Nq is left out of the causal rule",
    "Nq != Nk, bottom right",
    lambda: x.draw(lengths=(33, 64), causal="bottom_right"),
    source="SageAttention#372, cutlass#2336, x-transformers#187",
)
register(
    "key-tail-counted",
    "E",
    "columns past Nk are not masked; zero-filled keys score 0 and count in the row sum",
    "Nk not a multiple of the tile; all real scores near -20 make it large",
    lambda: x.shifted(-8.0),
    source="jax#27224, tiny-flash-attention#12, NNkernels.jl#16",
)
register(
    "lse-base-2",
    "J",
    "the log-sum-exp is returned in base 2",
    "any input, if the log-sum-exp is compared",
    x.draw,
    source="flashinfer#2113, pytorch#181645",
)
register(
    "accumulator-fp16",
    "P",
    "the output is accumulated in fp16",
    "equal scores, values about 1000, 256 keys: the sum passes 65504",
    lambda: x.equal_scores(256, 1000.0),
    source="llama.cpp#13975, ik_llama.cpp#1196",
)
register(
    "p-e4m3",
    "P",
    "P is rounded to 8 bits, which the kernel does not declare",
    "any input of 16 bits",
    lambda: x.draw(FP16),
    source="flash-attention#2131",
)
register(
    "gqa-tiled-heads",
    "I",
    "query head h reads key head h mod Hkv instead of h div group",
    "H=4, Hkv=2; one or H key heads hide it",
    lambda: x.draw(heads=(4, 2)),
    source="onnx#7274, jax-js#180, axlearn#842",
)
register(
    "rows-zeroed",
    "E",
    "rows of a ragged last row tile are not stored",
    "Nq not a multiple of the row tile",
    lambda: x.draw(lengths=(37, 16)),
    source="FlagGems#3395",
)
register(
    "finite-max-start",
    "B",
    "the running maximum starts at -5e4 instead of -inf",
    "all scores of a row at -1e5",
    lambda: x.shifted(-1e5),
    source="flashinfer#4267",
)

# Empty rows and tiles.
register(
    "empty-tile-no-guard",
    "A",
    "exp(-inf - -inf) where a row's first tile is hidden from it",
    "a window of 5 keys: later rows do not see the first tile",
    lambda: x.draw(lengths=(40, 40), window=(5, 0)),
    source="pytorch#127055, llama.cpp#12776",
)
register(
    "empty-row-div-zero",
    "A",
    "no guard for a row sum of 0",
    "causal, bottom right, Nq > Nk",
    lambda: x.draw(**_EMPTY_ROWS),
    source="burn#4694, pytorch#103749",
    caught_by="special.empty_rows",
)
register(
    "empty-row-mean",
    "A",
    "hidden scores are -1e30, so a row that sees nothing gets the mean of V",
    "causal, bottom right, Nq > Nk",
    lambda: x.draw(**_EMPTY_ROWS),
    source="pytorch#110213, pytorch#109517",
    caught_by="special.empty_rows",
)
register(
    "empty-row-lse-inf",
    "A",
    "the log-sum-exp of a row that sees nothing is +inf",
    "causal, bottom right, Nq > Nk, log-sum-exp compared",
    lambda: x.draw(**_EMPTY_ROWS),
    source="flash-attention#978",
    caught_by="special.empty_rows",
)
register(
    "empty-row-lse-zero",
    "A",
    "the log-sum-exp of a row that sees nothing is 0",
    "causal, bottom right, Nq > Nk, log-sum-exp compared",
    lambda: x.draw(**_EMPTY_ROWS),
    source="flashinfer#4452",
    caught_by="special.empty_rows",
)
register(
    "empty-row-copies-value",
    "A",
    "a row that sees nothing gets the first value",
    "causal, bottom right, Nq > Nk",
    lambda: x.draw(**_EMPTY_ROWS),
    caught_by="special.empty_rows",
)

# Causality and windows.
register("causal-strict", "C", "a row does not see its own diagonal", "causal", lambda: x.draw(**_LATE_ROWS))
register(
    "window-one-extra",
    "D",
    "the window reaches one key further left",
    "a window of 1",
    lambda: x.draw(lengths=(40, 40), window=(1, 0)),
    source="zml#763, Megatron-Bridge#2656, tokenspeed#578",
)
register(
    "window-one-short",
    "D",
    "the window is one key shorter on the left",
    "a window of 1",
    lambda: x.draw(lengths=(40, 40), window=(1, 0)),
    source="transformers#39408",
)
register(
    "window-right-ignored",
    "D",
    "the right side of the window is not applied",
    "a window that ends before the last key",
    lambda: x.draw(lengths=(40, 40), window=(4, 2)),
)
register(
    "window-other-diagonal",
    "D",
    "the window counts from the other diagonal",
    "Nq != Nk",
    lambda: x.draw(lengths=(20, 40), window=(4, 2)),
)
register(
    "window-start-tile-skipped",
    "D",
    "the first visited tile is rounded up instead of down",
    "a window that straddles a tile edge",
    lambda: x.draw(lengths=(4, 40), window=(9, 0)),
    source="TensorRT-LLM#6379",
)

# Tails, memory and stores.
register(
    "value-tail-unmasked",
    "E",
    "the last value tile is loaded without its row mask; P = 0 meets whatever lies behind",
    "Nk not a multiple of the tile, NaN behind the last row",
    lambda: x.with_buffer_tail(x.draw(), torch.nan),
    source="vllm#30887, SageAttention#377, pytorch#101967",
)
register(
    "store-spills-to-next-head",
    "E",
    "whole row tiles are stored, heads in descending order, so padding overwrites the next head's rows",
    "Nq not a multiple of the row tile, two heads",
    lambda: x.draw(lengths=(37, 16)),
    source="FlagGems#898",
)
register(
    "order-random",
    "N",
    "key tiles are visited in another order on every call",
    "two calls, several tiles",
    lambda: x.draw(FP32, lengths=(16, 128)),
    caught_by="bitwise.repeat",
)

# Head dims and grouped heads.
register(
    "head-dim-truncated",
    "F",
    "the product runs over the first 32 head dims only",
    "head dim above 32",
    lambda: x.draw(dims=(48, 48)),
    source="triton#621",
)
register(
    "value-dim-last-lost",
    "F",
    "the last column of the output is not stored",
    "any input",
    lambda: x.draw(dims=(16, 17)),
)
register(
    "gqa-swapped-divisor",
    "I",
    "the head index is divided by the number of key heads where the group is meant",
    "H=8, Hkv=2; H=4, Hkv=2 hides it",
    lambda: x.draw(heads=(8, 2)),
    source="native-sparse-attention-triton#27, FlagGems#3759",
)

# Log-sum-exp.
register(
    "lse-of-bare-products",
    "J",
    "the log-sum-exp is divided by the scale",
    "scale other than 1, log-sum-exp compared",
    x.draw,
)
register(
    "lse-is-max",
    "J",
    "the running maximum is returned for the log-sum-exp",
    "log-sum-exp compared",
    x.draw,
)
register(
    "lse-negated",
    "J",
    "the log-sum-exp has the wrong sign",
    "log-sum-exp compared",
    x.draw,
    source="flashinfer#2113",
)
register(
    "lse-bf16",
    "P",
    "the log-sum-exp is rounded to bf16",
    "log-sum-exp compared; scores at +200 make it large",
    lambda: x.shifted(200.0),
    source="tt-metal#41683",
)

# Cap, bias, masks, ALiBi.
register(
    "cap-after-mask",
    "K",
    "the cap is applied after the mask, so hidden keys score -cap",
    "cap 1, causal; cap 50 hides it",
    lambda: x.draw(lengths=(40, 40), causal="top_left", softcap=1.0),
    source="flash-attention#1025",
)
register(
    "cap-formula",
    "K",
    "s tanh(s / c) instead of c tanh(s / c)",
    "any cap",
    lambda: x.draw(softcap=2.0),
    source="flash-attention#2396, unsloth-zoo#593",
)
register("cap-ignored", "K", "the cap is not applied", "a small cap", lambda: x.draw(softcap=1.0))
register(
    "bias-times-scale",
    "L",
    "the scale is applied after the bias was added",
    "a bias, scale other than 1",
    x.biased,
    source="tt-metal#42694",
)
register(
    "bias-of-first-head", "L", "all heads read head 0's bias", "a bias per head", lambda: x.biased(heads=2)
)
register("bias-of-first-row", "L", "all rows read row 0's bias", "a bias per row", lambda: x.biased(rows=37))
register(
    "bias-bf16",
    "P",
    "an fp32 bias is rounded to bf16",
    "an fp32 bias, log-sum-exp or fp16 output compared",
    lambda: x.biased(fmt=FP16),
)
register(
    "alibi-sign",
    "L",
    "ALiBi rewards distant keys",
    "ALiBi",
    x.sloped,
    source="attention-gym#86",
)
register(
    "alibi-next-head",
    "L",
    "every head reads its neighbour's slope",
    "ALiBi, several heads",
    x.sloped,
    source="aprender#2143, mlx#343",
)
register(
    "alibi-top-left",
    "L",
    "ALiBi counts from the top-left diagonal",
    "ALiBi, Nq != Nk",
    lambda: x.sloped(lengths=(20, 40)),
)
register(
    "mask-inverted",
    "L",
    "True hides instead of shows",
    "a mask",
    x.masked,
    source="onnxruntime#14363",
)
register(
    "mask-of-first-batch",
    "L",
    "all batches read batch 0's mask",
    "a mask per batch",
    lambda: x.masked(batch=2),
    source="pytorch#172225",
)
register(
    "mask-of-first-head", "L", "all heads read head 0's mask", "a mask per head", lambda: x.masked(heads=2)
)
register(
    "mask-or-causal",
    "L",
    "mask and causality are combined by or",
    "a mask together with causality",
    lambda: x.masked(lengths=(40, 40), causal="top_left"),
    source="onnxruntime#14363",
)
register(
    "lengths-of-first-batch",
    "E",
    "all batches read batch 0's key length",
    "key lengths that differ",
    lambda: x.draw(batch=2, key_lengths=torch.tensor([20, 50])),
)
register(
    "lengths-one-extra",
    "E",
    "one key past the length is seen",
    "key lengths",
    lambda: x.draw(batch=2, key_lengths=torch.tensor([20, 50])),
    source="pegainfer#291",
)
register(
    "segments-ignored",
    "W",
    "packed sequences see each other",
    "a packed batch",
    x.packed,
    source="maxtext#4476",
)

# Precision.
register(
    "row-sum-16-bit",
    "P",
    "the row sum is kept in 16 bits",
    "log-sum-exp compared; or equal scores, values of 1 and very many keys",
    x.draw,
    source="tract#2586, executorch#20089, tt-metal#52045",
)
register(
    "row-sum-of-rounded",
    "P",
    "the row sum is taken over the rounded P, which the kernel does not declare",
    "log-sum-exp compared",
    x.draw,
)
register(
    "p-truncated",
    "P",
    "P is truncated instead of rounded to nearest",
    "bf16; the errors no longer average out",
    lambda: x.draw(lengths=(64, 128), dims=(32, 32)),
    caught_by="forward.cast_of_p",
    tiling_known=False,
)
register(
    "scale-slightly-wrong",
    "S",
    "the scale is 1e-4 too large; every element of O stays inside its bound, and its rms hardly moves",
    "fp16, thousands of elements",
    lambda: x.draw(FP16, lengths=(128, 128), dims=(32, 32)),
    caught_by="forward.score_scale",
    tiling_known=False,
)
register(
    "p-twice",
    "P",
    "P is rounded twice, the first time on a shifted grid",
    "bf16",
    lambda: x.draw(lengths=(64, 128), dims=(32, 32)),
    caught_by="forward.rms",
)
register(
    "output-truncated",
    "P",
    "the output is truncated instead of rounded to nearest",
    "any input of 16 bits",
    lambda: x.draw(FP16, lengths=(64, 128), dims=(32, 32)),
    caught_by="forward.rms",
)
register(
    "output-through-bf16",
    "P",
    "an fp16 or fp32 output passes through bf16",
    "fp32",
    lambda: x.draw(FP32),
)
register(
    "scores-fp16",
    "P",
    "the score tile is stored in fp16, which the kernel does not declare",
    "bf16, scores of 20 and more, log-sum-exp compared",
    lambda: x.draw(BF16, scale=1.0, dims=(64, 64)),
)
register(
    "rescale-bf16",
    "P",
    "the factor that rescales earlier tiles is rounded to bf16",
    "scores that grow along the keys, log-sum-exp compared",
    x.increasing,
)
register(
    "accumulator-truncated",
    "P",
    "the output is accumulated with 13 fraction bits, truncated",
    "fp16, many tiles",
    lambda: x.draw(FP32, lengths=(16, 256)),
    source="flash-attention#2250",
)

# Scale.
register(
    "scale-ignored",
    "S",
    "the scale that the caller passes is not used",
    "a scale other than the default",
    lambda: x.draw(scale=0.7),
    source="flashinfer#4014",
)
register(
    "scale-of-value-dim",
    "S",
    "the default scale is taken from the value dim",
    "a value dim other than the head dim",
    lambda: x.draw(dims=(16, 48)),
    source="native-sparse-attention-triton#27",
)
register(
    "scale-short-log2e",
    "S",
    "log2(e) is written as 1.442",
    "log-sum-exp compared, or large scores",
    lambda: x.draw(scale=1.0),
)
register(
    "scale-cached",
    "X",
    "the scale of the first call with a shape is used for all later ones",
    "two calls of one shape with different scales",
    lambda: (x.draw(scale=0.25), x.draw(scale=1.0)),
    source="flashinfer#4014, tt-metal#33304",
)
register(
    "max-before-scale-sign",
    "S",
    "the largest product is taken, then multiplied by a negative scale",
    "scale -1, scores of +-100",
    lambda: x.draw(scale=-10.0),
    source="pytorch#105202",
)

# Large and non-finite.
register(
    "scores-clamped",
    "Q",
    "scores are clamped to +-1e4",
    "scores past 1e4 that differ",
    lambda: x.draw(scale=1e5),
)
register(
    "nan-swallowed",
    "Q",
    "NaN in the output is replaced by 0, infinities by the largest number",
    "NaN in data that a row sees",
    x.one_nan,
    caught_by="special.nonfinite",
)
register(
    "exp-of-nan-is-zero",
    "Q",
    "the exponential of NaN is 0, so a row with an infinite score comes out as 0",
    "scores past the largest fp32 number",
    x.overflowing,
    caught_by="special.no_silent_overflow",
)

# Split keys.
register(
    "merge-two-empties",
    "T",
    "no guard where both partial results are empty",
    "4 splits, causal, bottom right, Nq > Nk",
    lambda: x.draw(lengths=(100, 64), causal="bottom_right"),
    source="vllm#28181, vllm#39148, flashinfer#4051",
    caught_by="special.empty_rows",
    splits=4,
)
register(
    "merge-without-max",
    "T",
    "weights exp(m) without subtracting the larger maximum",
    "2 splits, scores at +120",
    lambda: x.shifted(120.0),
    source="cutlass#2274",
    splits=2,
)
register(
    "merge-unweighted",
    "T",
    "partial results are added without weights",
    "2 splits",
    x.increasing,
    splits=2,
)
register(
    "split-stale-scratch",
    "T",
    "a split that had nothing to do leaves its scratch untouched, and is merged",
    "more splits than tiles",
    lambda: x.draw(lengths=(5, 53)),
    source="vllm#47188",
    splits=7,
)

# Sinks.
register("sink-ignored", "V", "the sink is not applied", "a sink", lambda: x.with_sink((1.0, 3.0)))
register("sink-twice", "V", "the sink counts twice", "a sink", lambda: x.with_sink((1.0, 3.0)))
register(
    "sink-next-head",
    "V",
    "every head reads its neighbour's sink",
    "sinks that differ",
    lambda: x.with_sink((1.0, 3.0)),
)
register(
    "sink-outside-the-max",
    "V",
    "the sink is added as exp(sink - m) and never joins the maximum",
    "a sink far above all scores",
    lambda: x.with_sink((100.0, 3.0)),
    source="TensorRT-LLM#19220",
)
register(
    "lse-without-sink",
    "V",
    "the log-sum-exp leaves the sink out",
    "a sink, log-sum-exp compared",
    lambda: x.with_sink((1.0, 3.0)),
)
