"""What a declaration obliges a certificate to have judged, and what a spec covers of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashcheck.inputs.problems import Wishes, Without, families_for, head_dims
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.inputs.values import FAMILIES
from flashcheck.kernel import Capabilities
from flashcheck.problem import Problem

ZERO_LENGTHS = {"zero keys": (17, 0), "zero queries": (0, 17)}


def empty_sequences(capabilities: Capabilities) -> dict[str, tuple[str, Without]]:
    """Label -> (option, what a sequence lacks), for the sequences of length 0 that a declaration allows."""
    found: dict[str, tuple[str, Without]] = {}
    if "cu_seqlens" in capabilities.options and capabilities.cross_lengths:
        found["packed sequence without queries"] = "cu_seqlens", "queries"
        if capabilities.empty_rows:
            found["packed sequence without keys"] = "cu_seqlens", "keys"
    if "key_lengths" in capabilities.options and capabilities.empty_rows:
        found["key length 0"] = "key_lengths", "keys"
    return found


def required(capabilities: Capabilities) -> dict[str, Wishes]:
    """Label -> wishes that make a spec cover it; every label is owed once per dtype."""
    owed: dict[str, Wishes] = {"no option": Wishes(causal="none", plain=True)}
    if "causal" in capabilities.options:
        owed |= {f"causal={a}": Wishes(causal=a) for a in capabilities.causal}
    if "scale" in capabilities.options:
        owed["scale>0"] = Wishes(scale=0.25)
        if capabilities.nonpositive_scale:
            owed |= {"scale=0": Wishes(scale=0.0, family="normal"), "scale<0": Wishes(scale=-0.125)}
    for option in capabilities.options:
        if option not in ("causal", "scale"):
            owed[f"option {option}"] = Wishes(option=option)
    owed["one head per key/value head"] = Wishes(grouped=False)
    if capabilities.gqa:
        owed["grouped heads"] = Wishes(grouped=True)
    dims = head_dims(capabilities)
    owed |= {
        f"head dim {d}": Wishes(head_dim=d, value_dim="same", lengths=(33, 33)) for d in {dims[0], dims[-1]}
    }
    if capabilities.value_dim_differs and len(dims) > 1:
        owed["value dim smaller"] = Wishes(value_dim="smaller")
        owed["value dim larger"] = Wishes(value_dim="larger")
    if capabilities.fewest_keys == 1:
        owed["one query, one key"] = Wishes(lengths=(1, 1))
    owed["ragged tail"] = Wishes(lengths=(129, 129))
    if capabilities.cross_lengths:
        owed |= {"Nq < Nk": Wishes(lengths=(33, 80)), "one query": Wishes(lengths=(1, 129))}
        if capabilities.empty_rows or "bottom_right" not in capabilities.causal:
            owed["Nq > Nk"] = Wishes(lengths=(65, 17))
        else:
            owed["Nq > Nk"] = Wishes(lengths=(65, 17), causal="none")
    if capabilities.length_multiple > 1:
        owed = _in_whole_tiles(owed, capabilities)
    if capabilities.empty_rows and has_empty_rows(capabilities):
        owed["empty rows"] = _empty_rows(capabilities)
    if capabilities.zero_length and capabilities.cross_lengths:
        owed |= {label: Wishes(lengths=pair, causal="none") for label, pair in ZERO_LENGTHS.items()}
    owed |= {label: Wishes(option=o, without=w) for label, (o, w) in empty_sequences(capabilities).items()}
    for name in families_for(capabilities):
        # Without options: with a bias or a cap a kernel may form its exponents in another way.
        overflows = "overflows" in FAMILIES[name].properties
        owed[f"values {name}"] = Wishes(family=name, scale=0.25 if overflows else None, plain=overflows)
    return owed


def _in_whole_tiles(owed: dict[str, Wishes], capabilities: Capabilities) -> dict[str, Wishes]:
    """Lengths rounded up to those that the kernel takes; what is owed for its length alone falls away."""
    kept = {}
    for label, wishes in owed.items():
        if wishes.lengths is not None:
            lengths = (capabilities.whole(wishes.lengths[0]), capabilities.whole(wishes.lengths[1]))
            if lengths != wishes.lengths and label in ("one query, one key", "one query", "ragged tail"):
                continue
            kept[label] = replace(wishes, lengths=lengths)
        else:
            kept[label] = wishes
    return kept


def has_empty_rows(capabilities: Capabilities) -> bool:
    """Some declared option can leave a row without keys."""
    cut = {"mask", "key_lengths", "cu_seqlens"} & set(capabilities.options)
    aligned = "causal" in capabilities.options and "bottom_right" in capabilities.causal
    return bool(cut) or (aligned and capabilities.cross_lengths)


def _empty_rows(capabilities: Capabilities) -> Wishes:
    if "bottom_right" in capabilities.causal and capabilities.cross_lengths:
        return Wishes(causal="bottom_right", empty_rows=True)
    return Wishes(option="mask" if "mask" in capabilities.options else "key_lengths", empty_rows=True)


_HIDING: dict[str, dict[str, None]] = {
    name: {name: None} for name in ("causal", "window", "mask", "key_lengths")
} | {"cu_seqlens": {"cu_seqlens_q": None, "cu_seqlens_k": None}}
"""Options whose whole effect is to hide keys, and what takes each out of a problem."""


def takes_part(problem: Problem, option: str) -> bool:
    """Whether an option that hides keys hides any here; options of other kinds always take part.

    A window as wide as the problem tests nothing.
    """
    if option not in _HIDING:
        return True
    without = problem.replaced(**_HIDING[option])
    return not torch.equal(problem.visible(), without.visible())


def covered(spec: ProblemSpec, problem: Problem) -> set[str]:
    """Labels of ``required`` that this problem covers."""
    labels = {f"values {spec.family}", f"head dim {spec.head_dim}"}
    labels.add("grouped heads" if problem.group > 1 else "one head per key/value head")
    labels |= {f"option {name}" for name in problem.options() if takes_part(problem, name)}
    if spec.causal is not None and takes_part(problem, "causal"):
        labels.add(f"causal={spec.causal}")
    if not set(problem.options()) - {"scale"}:
        labels.add("no option")
    if spec.scale is not None:
        labels.add("scale=0" if spec.scale == 0 else "scale<0" if spec.scale < 0 else "scale>0")
    if spec.value_dim != spec.head_dim:
        labels.add("value dim smaller" if spec.value_dim < spec.head_dim else "value dim larger")
    nq, nk = spec.num_queries, spec.num_keys
    if nk == 0:
        labels.add("zero keys")
    elif nq == 0:
        labels.add("zero queries")
    elif (nq, nk) == (1, 1):
        labels.add("one query, one key")
    elif nq == 1:
        labels.add("one query")
    if nk and nq and nq != nk:
        labels.add("Nq < Nk" if nq < nk else "Nq > Nk")
    if spec.segments is not None:
        lacking = {(not q, not k) for q, k in spec.segments}
        labels |= {"packed sequence without keys"} if (False, True) in lacking else set()
        labels |= {"packed sequence without queries"} if (True, False) in lacking else set()
    if spec.key_lengths is not None and nk and nq and 0 in spec.key_lengths:
        labels.add("key length 0")
    if nk % 16 and nk > 64:
        labels.add("ragged tail")
    if nk and nq and bool((~problem.visible().any(-1)).any()):
        labels.add("empty rows")
    return labels
