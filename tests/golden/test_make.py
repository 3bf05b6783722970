"""The recorded vectors are what the seeds give."""

from __future__ import annotations

import random
from typing import Any

import pytest

from flashcheck.golden.draw import Draw
from flashcheck.golden.entry import FORMATS, GROUPS
from flashcheck.golden.limits import _rounded_up, decoded
from flashcheck.golden.make import make_record
from flashcheck.golden.patterns import from_hex

EXACT_TIES = {
    "ties": "equal keys",
    "cancellation": "terms that cancel exactly",
    "options": "scale 0",
    "combined": "rows that see one key, or keys of equal score",
    "empty_rows": "rows that see one key",
    "single_key": "one key",
    "format_ends": "equal values",
}


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_a_problem_is_made_bit_for_bit(problems: dict[str, Any], group: str) -> None:
    """One problem of each group."""
    entry = random.Random(1).choice(GROUPS[group].entries()[:20])
    made, recorded = make_record(entry), problems[entry.id]
    for key in recorded:
        if key != "expected":
            assert made[key] == recorded[key]
    for name, x in made["expected"].items():
        for key in x:
            if key != "bounds":
                assert x[key] == recorded["expected"][name][key], (name, key)
    _bounds_still_hold(made, recorded)


def _bounds_still_hold(made: Any, recorded: Any) -> None:
    """A recorded bound may be looser than today's, never tighter: then ``flashcheck golden make`` is due."""
    for name, x in made["expected"].items():
        for arithmetic, text in x["bounds"].items():
            then = decoded(from_hex(recorded["expected"][name]["bounds"][arithmetic], 16))
            now = decoded(from_hex(text, 16))
            assert bool((now[0] <= then[0]).all()), (name, arithmetic)
            assert bool((now[1] <= then[1]).all()), (name, arithmetic)


def test_ids_are_unique_and_name_group_and_format() -> None:
    ids = [entry.id for group in GROUPS.values() for entry in group.entries()]
    assert len(ids) == len(set(ids))
    names = {fmt.name for fmt in FORMATS}
    for group in GROUPS.values():
        for entry in group.entries():
            assert entry.id.startswith(f"{group.name}.")
            assert entry.id.split(".")[1] in names


def test_ties_are_assumed_only_where_they_are_exact(groups: dict[str, Any]) -> None:
    """Where e^-1e5 separates a value from a boundary, assuming a tie would round it wrongly."""
    for name, group in groups.items():
        tied = [p["id"] for p in group["problems"] if "ExactTie" in p["flags"]]
        assert not tied or name in EXACT_TIES, tied


def test_draws_do_not_change() -> None:
    """Values of Python's generator, written down: another Python must give the same."""
    draw = Draw("golden")
    assert [int(x * 65536) for x in draw.normal(4).tolist()] == NORMALS
    assert draw.integers(-5, 5, 6).tolist() == INTEGERS


NORMALS = [39838, 85772, 75153, -829]
INTEGERS = [4.0, 5.0, 3.0, -3.0, 2.0, -4.0]


def test_bounds_are_rounded_up_to_few_bits() -> None:
    for x in (1.0, 1.0001, 3e-41, 0.1, 2.0**-140, 3.3e38):
        up = _rounded_up(x)
        assert x <= up <= x * (1 + 2.0**-5) + 2.0**-133
    assert _rounded_up(3.4e38) == float("inf")
    assert _rounded_up(0.0) == 0.0
    bound, legal = decoded([0x8000 | 0x3F80, 0x0000, 0x7F80])
    assert bound.tolist() == [1.0, 0.0, float("inf")]
    assert legal.tolist() == [True, False, False]
