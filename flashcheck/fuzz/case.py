"""One fuzz case as plain data: a problem and the checks to make; what files store and pipes carry."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from flashcheck.bits import bytes_of
from flashcheck.errors import ArgumentError
from flashcheck.formats import FORMATS
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.problem import Problem

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class FuzzCase:
    """A problem, by spec or (after its values were reduced) by its tensors, and what to judge on it.

    Attributes:
        spec: rebuilds the problem; the origin of ``tensors`` where these are given.
        checks: names, in the order in which they are made.
        tensors: the fields of the Problem, as ``problem_to_json`` writes them, or None.
    """

    spec: ProblemSpec
    checks: tuple[str, ...]
    tensors: str | None = None

    def build(self) -> Problem:
        """The problem; deterministic."""
        if self.tensors is None:
            return self.spec.build()
        return problem_from_json(json.loads(self.tensors))

    @property
    def size(self) -> tuple[int, ...]:
        """Sorts cases by how much there is to read: tokens, heads, dims, then options, then values."""
        s = self.spec
        options = sum(
            value not in (None, False) for value in (s.causal, s.mask, s.window, s.softcap, s.scale)
        )
        options += sum(map(bool, (s.bias, s.alibi, s.sink, s.key_lengths is not None, s.segments)))
        heads = s.batch * s.num_heads
        return (s.num_queries + s.num_keys, heads, s.head_dim + s.value_dim, options, s.seed)

    @property
    def key(self) -> str:
        """Names the case: equal cases, equal keys, on every machine."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "spec": self.spec.to_json(),
            "checks": list(self.checks),
        }
        return data if self.tensors is None else data | {"tensors": json.loads(self.tensors)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> FuzzCase:
        """The inverse of ``to_json``; raises ArgumentError for a version that this code does not read."""
        if data.get("format_version") != FORMAT_VERSION:
            raise ArgumentError("case format_version", data.get("format_version"), str(FORMAT_VERSION))
        tensors = data.get("tensors")
        return FuzzCase(
            ProblemSpec.from_json(data["spec"]),
            tuple(data["checks"]),
            None if tensors is None else json.dumps(tensors),
        )


_DTYPES = {str(f.dtype): f.dtype for f in FORMATS.values()} | {
    str(t): t for t in (torch.float64, torch.bool, torch.int32, torch.int64)
}


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """Every field that is set; tensors as dtype, shape and the hex of their bytes (so NaN survives)."""
    data: dict[str, Any] = {}
    for f in fields(problem):
        value = getattr(problem, f.name)
        if isinstance(value, Tensor):
            data[f.name] = {
                "dtype": str(value.dtype),
                "shape": list(value.shape),
                "bytes": bytes_of(value).hex(),
            }
        elif value is not None:
            data[f.name] = list(value) if isinstance(value, tuple) else value
    return data


def problem_from_json(data: dict[str, Any]) -> Problem:
    """The inverse of ``problem_to_json``."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, dict):
            raw = torch.tensor(list(bytes.fromhex(value["bytes"])), dtype=torch.uint8)
            values[name] = raw.view(_DTYPES[value["dtype"]]).reshape(value["shape"])
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
    return Problem(**values)
