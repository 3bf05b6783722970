"""Recomputes golden problems by two routes that share no formula code, and compares every digit.

Route 1: balls (python-flint) at another precision, rounded anew: digits and bit patterns must be the same.
Route 2: mpmath: every value must lie within half a unit of the 30th digit, give or take its own error, and
patterns must be what rounding the digits in exact rationals gives. Inputs are made anew from the seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from flashcheck.errors import ArgumentError
from flashcheck.formats import to_float64
from flashcheck.golden import files
from flashcheck.golden.answer import FIRST_EXTRA_BITS, GRADIENTS, Answer, answer, cleaned, flat
from flashcheck.golden.entry import GROUPS, Entry
from flashcheck.golden.patterns import from_hex
from flashcheck.golden.rational import rounded
from flashcheck.golden.record import Data, problem_of, record, stored_of
from flashcheck.golden.rounding import DIGITS, PATTERNS, width
from flashcheck.oracle import exact
from flashcheck.problem import Problem

SLACK = Fraction(1, 10**6)
"""mpmath's own error in units of the 30th digit: it works with 15 digits more, at least."""

_MP_DIGITS = (DIGITS + 15, 250, 1250)
"""mpmath works with these, one after the other, until it agrees: sums may cancel by 100 digits and more."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What was compared: problems, values; faults, one line each."""

    problems: int
    values: int
    faults: tuple[str, ...]


def sample(folder: Path, count: int | None, seed: int) -> list[tuple[Data, Entry]]:
    """``count`` problems (None: all) next to the entries that the seeds give."""
    everything = [
        (problem, entry)
        for name, group in GROUPS.items()
        for problem, entry in _paired(files.read_group(folder, name)["problems"], group.entries(), name)
    ]
    if count is None or count >= len(everything):
        return everything
    return random.Random(seed).sample(everything, count)


def _paired(problems: list[Data], entries: list[Entry], group: str) -> Iterator[tuple[Data, Entry]]:
    ids = [p["id"] for p in problems]
    if ids != [e.id for e in entries]:
        raise ArgumentError(
            "--folder", f"vectors/{group}.json with other problems", "this version's: flashcheck golden make"
        )
    return zip(problems, entries, strict=True)


def verify(chosen: list[tuple[Data, Entry]], on_problem: Callable[[int, int, str], None]) -> Verified:
    """Compares every digit of the chosen problems."""
    faults: list[str] = []
    values = 0
    for n, (data, entry) in enumerate(chosen):
        faults += [f"{data['id']}: {fault}" for fault in faults_of(data, entry)]
        values += sum(len(x["digits"].split()) for x in data["expected"].values())
        on_problem(n + 1, len(chosen), data["id"])
    return Verified(len(chosen), values, tuple(faults))


def faults_of(data: Data, entry: Entry) -> Iterator[str]:
    """What is wrong with one stored problem, one line each."""
    again = answer(entry, 2 * FIRST_EXTRA_BITS)
    yield from _first_route(data, entry, again)
    yield from _roundings(data)
    yield from _second_route(data)


def _first_route(data: Data, entry: Entry, again: Answer) -> Iterator[str]:
    fresh = record(entry, again, {})
    for key in ("purpose", "flags", "notes", "sizes", "options", "inputs", "stored"):
        if data.get(key) != fresh.get(key):
            yield f"{key} is not what the seed gives"
    if list(data["expected"]) != list(fresh["expected"]):
        yield f"expected has {list(data['expected'])}, the seed gives {list(fresh['expected'])}"
        return
    for name, x in fresh["expected"].items():
        for key in ("shape", "digits", *(fmt.name for fmt in PATTERNS)):
            if data["expected"][name][key] != x[key]:
                yield f"{name}.{key} differs from the first route's"


def _roundings(data: Data) -> Iterator[str]:
    """Bit patterns against the digits; a value within a 30th digit of a boundary may round either way."""
    for name, x in data["expected"].items():
        digits = x["digits"].split()
        for fmt in PATTERNS:
            codes = from_hex(x[fmt.name], width(fmt))
            if len(codes) != len(digits):
                yield f"{name}.{fmt.name} has {len(codes)} words for {len(digits)} values"
                continue
            for n, (text, code) in enumerate(zip(digits, codes, strict=True)):
                if code not in rounded(text, fmt):
                    yield f"{name}.{fmt.name}[{n}] is not {text} rounded"


def _second_route(data: Data) -> Iterator[str]:
    found: list[str] = []
    for digits in _MP_DIGITS:
        found = list(_by_mpmath(data, digits))
        if not found:
            break
    yield from found


def _by_mpmath(data: Data, working_digits: int) -> Iterator[str]:
    problem = problem_of(data)
    clean = cleaned(problem)
    skip = poisoned(problem) if "NonFinite" in data["flags"] else None
    heads = [
        [exact.forward(clean, b, h, digits=working_digits) for h in range(clean.num_heads)]
        for b in range(clean.batch)
    ]
    computed: dict[str, Any] = {
        "out": [[head.out for head in batch] for batch in heads],
        "lse": [[head.lse for head in batch] for batch in heads],
    }
    given = stored_of(data)
    if given is not None:
        gradients = exact.backward(clean, *given, digits=working_digits)
        computed |= {name: getattr(gradients, name) for name in GRADIENTS}
    for name, x in data["expected"].items():
        values = list(flat(computed[name]))
        digits = x["digits"].split()
        if len(values) != len(digits):
            yield f"{name} has {len(digits)} values, mpmath {len(values)}"
            continue
        for n, (text, value) in enumerate(zip(digits, values, strict=True)):
            if skip is not None and skip[name][n]:
                if text not in ("nan", "inf", "-inf"):
                    yield f"{name}[{n}] is {text} where NaN or inf is visible"
            elif not agrees(text, value):
                yield f"{name}[{n}] is {text}, mpmath gives {value}"


def poisoned(problem: Problem) -> dict[str, list[bool]]:
    """Elements that NaN or inf reaches, by the contract's words: rows that see it; of v, its column alone."""
    seen = problem.visible()
    q, k, v = (~torch.isfinite(to_float64(x)) for x in (problem.q, problem.k, problem.v))
    keys = k.any(-1).repeat_interleave(problem.group, 1)
    rows = q.any(-1) & seen.any(-1) | (seen & keys.unsqueeze(2)).any(-1)
    values = v.repeat_interleave(problem.group, 1)
    columns = (seen.unsqueeze(-1) & values.unsqueeze(2)).any(3)
    return {"out": (rows.unsqueeze(-1) | columns).flatten().tolist(), "lse": rows.flatten().tolist()}


def agrees(text: str, value: Any) -> bool:
    """True where the mpf ``value`` is within half a unit of the last of 30 digits of ``text``."""
    if text in ("nan", "inf", "-inf"):
        return str(value) in (text, f"+{text}")
    if text == "0":
        return bool(abs(value) < value.context.mpf(2) ** -100) if value else True
    ctx = value.context
    mantissa, _, exponent = text.partition("e")
    with ctx.workprec(ctx.prec + 160):  # powers of ten with exponents of 38 digits
        power = int(exponent)
        stated = ctx.mpf(int(mantissa.replace(".", ""))) * ctx.mpf(10) ** (power - _decimals(mantissa))
        unit = ctx.mpf(10) ** (power - DIGITS + 1)
        return bool(abs(value - stated) <= unit * (0.5 + float(SLACK)))


def _decimals(mantissa: str) -> int:
    return len(mantissa.partition(".")[2])
