"""A golden problem as plain JSON data, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashcheck.formats import BF16, FP64, Format, format_named, format_of
from flashcheck.golden.answer import Answer, Tensors, stored_forward
from flashcheck.golden.entry import FLAGS, Entry
from flashcheck.golden.patterns import from_hex, from_patterns, to_hex, to_patterns
from flashcheck.golden.rounding import PATTERNS, width
from flashcheck.problem import Problem

FORMAT_VERSION = 1

TENSOR_INPUTS = ("q", "k", "v", "dout", "dlse", "bias", "alibi_slopes", "sink")
INTEGER_INPUTS = ("key_lengths", "cu_seqlens_q", "cu_seqlens_k")
NUMBERS = ("scale", "causal", "window", "softcap", "q_descale", "k_descale", "v_descale")

Data = dict[str, Any]


def record(entry: Entry, answer: Answer, bounds: dict[str, dict[str, list[int]]]) -> Data:
    """One element of ``problems`` in a group's file (golden/schema.json)."""
    problem = entry.problem
    flags = {*entry.flags, *(["ExactTie"] if answer.ties else [])}
    data: Data = {
        "id": entry.id,
        "purpose": entry.purpose,
        "flags": [name for name in FLAGS if name in flags],
        "notes": list(entry.notes),
        "sizes": {
            "batch": problem.batch,
            "num_heads": problem.num_heads,
            "num_kv_heads": problem.num_kv_heads,
            "num_queries": problem.num_queries,
            "num_keys": problem.num_keys,
            "head_dim": problem.head_dim,
            "value_dim": problem.value_dim,
        },
        "options": _options(problem),
        "inputs": _inputs(problem),
        "expected": {
            name: _expected(tensors, {a: b[name] for a, b in bounds.items() if name in b})
            for name, tensors in answer.tensors.items()
        },
    }
    if "dq" in answer.tensors:
        out, lse = stored_forward(problem, answer.tensors)
        data["stored"] = {"out": _tensor(out), "lse": _tensor(lse)}
    return data


def _options(problem: Problem) -> Data:
    options: Data = {name: getattr(problem, name) for name in NUMBERS}
    if problem.window is not None:
        options["window"] = list(problem.window)
    options["effective_scale"] = problem.effective_scale
    for name in INTEGER_INPUTS:
        value = getattr(problem, name)
        options[name] = None if value is None else value.tolist()
    return options


def _inputs(problem: Problem) -> Data:
    inputs = {name: _tensor(x) for name in TENSOR_INPUTS if (x := getattr(problem, name)) is not None}
    if problem.mask is not None:
        inputs["mask"] = {
            "format": "bool",
            "shape": list(problem.mask.shape),
            "bits": to_hex(problem.mask.to(torch.uint8).flatten().tolist(), 8),
        }
    return inputs


def _tensor(x: Tensor) -> Data:
    fmt = format_of(x.dtype)
    return {"format": fmt.name, "shape": list(x.shape), "bits": to_hex(to_patterns(x, fmt), width(fmt))}


def _expected(tensors: Tensors, bounds: dict[str, list[int]]) -> Data:
    return {
        "shape": list(tensors.shape),
        "digits": " ".join(tensors.digits),
        **{fmt.name: to_hex(tensors.patterns[fmt.name], width(fmt)) for fmt in PATTERNS},
        "bounds": {name: to_hex(codes, width(BF16)) for name, codes in bounds.items()},
    }


def problem_of(data: Data) -> Problem:
    """The problem that a record describes."""
    fields: Data = {name: _decoded(x) for name, x in data["inputs"].items()}
    options = data["options"]
    fields |= {name: options[name] for name in NUMBERS}
    if options["window"] is not None:
        fields["window"] = tuple(options["window"])
    for name in INTEGER_INPUTS:
        if options[name] is not None:
            fields[name] = torch.tensor(options[name], dtype=torch.int64)
    return Problem(**fields)


def _decoded(data: Data) -> Tensor:
    if data["format"] == "bool":
        codes = from_hex(data["bits"], 8)
        return torch.tensor(codes, dtype=torch.bool).reshape(data["shape"])
    return tensor_of(data["bits"], data["shape"], format_named(data["format"]))


def tensor_of(bits: str, shape: list[int], fmt: Format) -> Tensor:
    """A tensor from hex words."""
    return from_patterns(from_hex(bits, width(fmt)), shape, fmt)


def stored_of(data: Data) -> tuple[Tensor, Tensor] | None:
    """O and LSE that the backward reads; None where no gradients are expected."""
    if "stored" not in data:
        return None
    return _decoded(data["stored"]["out"]), _decoded(data["stored"]["lse"])


def exact_of(expected: Data) -> Tensor:
    """Expected values rounded to float64."""
    return tensor_of(expected["fp64"], expected["shape"], FP64)
