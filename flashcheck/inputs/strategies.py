"""Hypothesis strategies over the same space as ``problems``; what they draw is a ProblemSpec.

Everything shrinks toward one head, 16 x 16 x 16, no options, normal values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from flashcheck.inputs.problems import GROUPED_HEADS, HEADS, LENGTHS, families_for, head_dims
from flashcheck.inputs.spec import MASK_KINDS, ProblemSpec
from flashcheck.kernel import Capabilities
from flashcheck.masks import Alignment


def specs(capabilities: Capabilities, dtype: str, largest: int = 129) -> st.SearchStrategy[ProblemSpec]:
    """Specs of one dtype that the declaration covers; lengths up to ``largest``."""

    drawn = _fields(capabilities, dtype, largest).map(lambda spec: _legal(spec, capabilities))
    return drawn.filter(lambda spec: capabilities.refuses(spec.outline()) is None)


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
        shape: tuple[int, int], kv: tuple[int, int], dims: tuple[int, int], **rest: object
    ) -> ProblemSpec:
        return ProblemSpec(
            dtype=dtype,
            num_queries=shape[0],
            num_keys=shape[1],
            num_heads=kv[0],
            num_kv_heads=kv[1],
            head_dim=dims[0],
            value_dim=dims[1],
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
        bias=_flag("bias" in options),
        alibi=_flag("alibi_slopes" in options),
        softcap=_if("softcap" in options, st.none() | st.sampled_from((1.0, 15.0, 50.0))),
        sink=_flag("sink" in options),
        family=st.sampled_from(families_for(capabilities)),
        seed=st.integers(0, 2**16),
    )


def _if(declared: bool, strategy: st.SearchStrategy[float | None]) -> st.SearchStrategy[float | None]:
    return strategy if declared else st.none()


def _flag(declared: bool) -> st.SearchStrategy[bool]:
    return st.booleans() if declared else st.just(False)


def _legal(spec: ProblemSpec, capabilities: Capabilities) -> ProblemSpec:
    """Repairs what fields drawn apart cannot know of each other; filtering would waste draws."""
    changes: dict[str, Any] = {}
    if not capabilities.value_dim_differs:
        changes["value_dim"] = spec.head_dim
    nq, nk = spec.num_queries, spec.num_keys
    if not capabilities.cross_lengths:
        changes["num_keys"] = nq
    elif spec.causal == "bottom_right" and nq > nk and not capabilities.empty_rows:
        changes |= {"num_queries": nk, "num_keys": nq}
    return replace(spec, **changes)
