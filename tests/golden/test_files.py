"""What golden/ holds: enough problems, every option, format and flag; files that agree with each other."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import pytest
import safetensors.torch
import torch

from flashcheck.golden import files
from flashcheck.golden.entry import FLAGS, FORMATS, GROUPS
from flashcheck.golden.record import exact_of, problem_of
from flashcheck.problem import OPTIONS
from tests.golden.conftest import FOLDER

Groups = dict[str, Any]
LARGEST_SIZE = 40_000_000
FEWEST_PROBLEMS = 600


def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads((FOLDER / "schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_number_and_size(groups: Groups, problems: Groups) -> None:
    assert len(problems) == sum(len(g["problems"]) for g in groups.values()) >= FEWEST_PROBLEMS
    size = sum(p.stat().st_size for p in FOLDER.rglob("*") if "certificates" not in p.parts and p.is_file())
    assert size <= LARGEST_SIZE
    assert sum("stored" in p for p in problems.values()) >= FEWEST_PROBLEMS  # with a backward


def test_every_option_in_every_format(problems: Groups) -> None:
    seen = {
        (p["inputs"]["q"]["format"], option) for p in problems.values() for option in problem_of(p).options()
    }
    assert seen == {(fmt.name, option) for fmt in FORMATS for option in OPTIONS}
    for fmt in FORMATS:
        flags = {f for p in problems.values() if p["inputs"]["q"]["format"] == fmt.name for f in p["flags"]}
        assert set(FLAGS) - flags <= {"OutputOverflow", "ExactTie"}, fmt


def test_tile_edges_and_group_ratios(problems: Groups) -> None:
    sizes = [p["sizes"] for p in problems.values()]
    lengths = {15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129}
    assert lengths <= {s["num_keys"] for s in sizes}
    assert lengths <= {s["num_queries"] for s in sizes}
    ratios = {(s["num_heads"] // s["num_kv_heads"], s["num_kv_heads"]) for s in sizes}
    assert any(group not in (1, kv) for group, kv in ratios)


def test_logits_of_every_decade(problems: Groups) -> None:
    for power in (2, 4, 8, 16, 25, 30, 34):
        for fmt in FORMATS:
            lse = exact_of(problems[f"huge_logits.{fmt}.1e{power}"]["expected"]["lse"])
            assert 10.0 ** (power - 2) < float(lse.abs().max()) < 10.0 ** (power + 2)


@pytest.mark.parametrize("name", sorted(GROUPS))
def test_the_schema_takes_every_file(groups: Groups, name: str) -> None:
    validator().validate(groups[name])


def spoilt(data: Any) -> list[Any]:
    def changed(*path: Any, value: Any) -> Any:
        copied = copy.deepcopy(data)
        place = copied["problems"][0]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return copied

    return [
        changed("inputs", "q", "bits", value="0G"),
        changed("inputs", "q", "format", value="fp23"),
        changed("expected", "out", "digits", value="1,5"),
        changed("options", "causal", value="left"),
        changed("sizes", "batch", value=0),
        changed("surprise", value=1),
    ]


def test_the_schema_refuses_what_is_wrong(groups: Groups) -> None:
    data = {**groups["options"], "problems": groups["options"]["problems"][:1]}
    assert validator().is_valid(data)
    for bad in spoilt(data):
        assert not validator().is_valid(bad)


def test_the_manifest_and_the_files_agree(groups: Groups) -> None:
    assert list(files.damaged(FOLDER)) == []
    facts = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))
    assert facts["groups"] == {name: len(group["problems"]) for name, group in groups.items()}
    listed = {*facts["files"]}
    assert listed == {f"vectors/{p.name}" for p in (FOLDER / "vectors").iterdir()}


def test_files_are_what_the_writers_write(groups: Groups) -> None:
    for name, group in groups.items():
        rebuilt = files.group_data(name, group["problems"])
        assert files.group_path(FOLDER, name).read_text(encoding="utf-8") == files.to_text(rebuilt)
        assert (FOLDER / "vectors" / f"{name}.bin").read_bytes() == files.to_binary(group["problems"])


def test_safetensors_hold_the_same_arrays(problems: Groups) -> None:
    loaded = safetensors.torch.load_file(FOLDER / "vectors" / "golden.safetensors")
    count = 0
    for name, problem in problems.items():
        arrays = files.arrays(problem)
        count += len(arrays)
        for key, (_, shape, raw) in arrays.items():
            x = loaded[f"{name}/{key}"]
            assert list(x.shape) == list(shape)
            assert x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == raw
    assert count == len(loaded)
