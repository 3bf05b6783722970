"""Makes golden/ from seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from flashcheck.files import write_atomically
from flashcheck.golden import files
from flashcheck.golden.answer import answer
from flashcheck.golden.entry import GROUPS, Entry
from flashcheck.golden.limits import bounds
from flashcheck.golden.record import Data, record

PART = ".part"


def make_record(entry: Entry) -> Data:
    """One problem with its answer and bounds."""
    exact = answer(entry)
    # Through text: what is written is what was made, number by number.
    data: Data = json.loads(json.dumps(record(entry, exact, bounds(entry.problem, exact.tensors))))
    return data


def make(folder: Path, on_problem: Callable[[int, int, str], None]) -> dict[str, int]:
    """Writes all files; returns problems per group.

    A group that an interrupted run finished is taken over from its ``.part`` file.

    Args:
        on_problem: called with (done, total, id).
    """
    entries = {name: group.entries() for name, group in GROUPS.items()}
    total = sum(map(len, entries.values()))
    made: dict[str, list[Data]] = {}
    done = 0
    for name, members in entries.items():
        part = folder / "vectors" / f".{name}{PART}"
        if part.is_file():
            made[name] = json.loads(part.read_text(encoding="utf-8"))
            done += len(members)
            continue
        made[name] = []
        for entry in members:
            made[name].append(make_record(entry))
            done += 1
            on_problem(done, total, entry.id)
        write_atomically(part, json.dumps(made[name]).encode())
    for name, problems in made.items():
        text = files.to_text(files.group_data(name, problems))
        write_atomically(files.group_path(folder, name), text.encode())
        write_atomically(folder / "vectors" / f"{name}.bin", files.to_binary(problems))
    write_atomically(folder / files.SAFETENSORS, files.to_safetensors(made))
    counts = {name: len(problems) for name, problems in made.items()}
    facts = json.dumps(files.manifest(folder, counts), indent=1) + "\n"
    write_atomically(folder / files.MANIFEST, facts.encode())
    for part in _parts(folder):
        part.unlink()
    return counts


def _parts(folder: Path) -> Iterator[Path]:
    yield from (folder / "vectors").glob(f".*{PART}")
