"""Hypothesis strategies over the same space as ``problems``; what they draw is a ProblemSpec.

Everything shrinks toward one head, 16 x 16 x 16, no options, normal values.
"""

from __future__ import annotations

from hypothesis import strategies as st

from flashcheck.inputs.combinations import is_legal
from flashcheck.inputs.gradients import GRADIENT_KINDS
from flashcheck.inputs.problems import GROUPED_HEADS, HEADS, LENGTHS, WINDOWS, families_for, head_dims
from flashcheck.inputs.spec import BIAS_KINDS, MASK_KINDS, SINK_KINDS, ProblemSpec
from flashcheck.kernel import Capabilities
from flashcheck.masks import Alignment


def specs(capabilities: Capabilities, dtype: str, largest: int = 129) -> st.SearchStrategy[ProblemSpec]:
    """Specs of one dtype that the declaration covers; lengths up to ``largest``."""

    return _fields(capabilities, dtype, largest).filter(lambda spec: is_legal(spec, capabilities))


def _fields(capabilities: Capabilities, dtype: str, largest: int) -> st.SearchStrategy[ProblemSpec]:
    options = set(capabilities.options)
    length = st.sampled_from([16] + [n for n in LENGTHS if n <= largest and n != 16]) | st.integers(
        1, largest
    )
    dim = st.sampled_from(sorted(head_dims(capabilities), key=lambda d: abs(d - 16)))
    heads = st.sampled_from(HEADS + (GROUPED_HEADS if capabilities.gqa else ()))
    alignments: list[Alignment | None] = [None]
    if "causal" in options:
        alignments += [a for a in ("top_left", "bottom_right") if a in capabilities.causal]
    masks = [None, *MASK_KINDS] if "mask" in options else [None]
    if not capabilities.empty_rows:
        masks = [m for m in masks if m != "holes"]

    def build(
        shape: tuple[int, int],
        kv: tuple[int, int],
        dims: tuple[int, int],
        batch: int,
        lengths: bool,
        packed: bool,
        **rest: object,
    ) -> ProblemSpec:
        nq, nk = map(capabilities.whole, shape)
        aligned = rest["causal"] == "bottom_right" and not capabilities.empty_rows
        if not capabilities.cross_lengths:
            nk = nq
        elif aligned and nq > nk:
            nq, nk = nk, nq
        halves = ((nq // 3, nk // 2), (0, 0), (nq - nq // 3, nk - nk // 2))
        batch = 1 if packed else batch
        return ProblemSpec(
            dtype=dtype,
            num_queries=nq,
            num_keys=nk,
            num_heads=kv[0],
            num_kv_heads=kv[1],
            head_dim=dims[0],
            value_dim=dims[1] if capabilities.value_dim_differs else dims[0],
            batch=batch,
            key_lengths=tuple(-(-nk // (b + 1)) for b in range(batch)) if lengths else None,
            segments=halves if packed else None,
            **rest,  # type: ignore[arg-type]
        )

    return st.builds(
        build,
        shape=st.tuples(length, length),
        kv=heads,
        dims=st.tuples(dim, dim),
        batch=st.integers(1, 2),
        scale=_if("scale" in options, st.none() | st.sampled_from((1.0, 0.25, 0.0, -0.125))),
        causal=st.sampled_from(alignments),
        mask=st.sampled_from(masks),
        bias=st.sampled_from([False, *BIAS_KINDS] if "bias" in options else [False]),
        lengths=_flag("key_lengths" in options),
        packed=_flag("cu_seqlens" in options),
        gradient=st.sampled_from(list(GRADIENT_KINDS)),
        window=st.sampled_from([None, *WINDOWS] if "window" in options else [None]),
        alibi=_flag("alibi_slopes" in options),
        softcap=_if("softcap" in options, st.none() | st.sampled_from((1.0, 15.0, 50.0))),
        sink=st.sampled_from([False, True, *SINK_KINDS] if "sink" in options else [False]),
        family=st.sampled_from(families_for(capabilities)),
        seed=st.integers(0, 2**16),
    )


def _if(declared: bool, strategy: st.SearchStrategy[float | None]) -> st.SearchStrategy[float | None]:
    return strategy if declared else st.none()


def _flag(declared: bool) -> st.SearchStrategy[bool]:
    return st.booleans() if declared else st.just(False)
