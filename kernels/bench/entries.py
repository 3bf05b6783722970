"""What a sweep says for the tables of `kernels.tuning`: ``python -m kernels.bench.entries FILE``.

FILE is what `kernels.bench.sweep --json` wrote. Prints entries to be put in by hand, with their times; what
was not right, repeatable and measured at every length does not count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from kernels.bench.candidates import tile_of
from kernels.bench.means import geometric_mean
from kernels.bench.sweep import usable
from kernels.tuning import Tile, hopper_forward_tile, padded

_ALWAYS = 1 << 30
_FEWEST_KEYS = 1024  # as in the sweep
# (kernel, head dim) -> causal -> what ran -> milliseconds by length; what ran: (tile, way)
Times = dict[tuple[str, int], dict[bool, dict[tuple[Tile, str], dict[int, float]]]]
_PIPELINED = ("pipelined-fp8", "pipelined-packed", "pipelined")
_WAYS = ("", "-persistent", "-turns", "-turns-persistent")


def times(record: dict[str, Any]) -> Times:
    """All usable times of a record; ways of the kernel in Gluon under its name."""
    found: Times = {}
    for group in record["groups"]:
        name = group["kernel"]
        kernel = next((base for base in _PIPELINED if name.startswith(base)), name)
        by_mask = found.setdefault((kernel, group["head_dim"]), {False: {}, True: {}})
        for line in group["results"]:
            if usable(line) and len(line["milliseconds"]) == len(group["lengths"]):
                spent = {int(length): ms for length, ms in line["milliseconds"].items()}
                ran = (tile_of(line["tile"]), name.removeprefix(kernel))
                known = by_mask[group["causal"]].get(ran)
                # Of several orders of heads the default one, which came first.
                by_mask[group["causal"]][ran] = known or spent
    return found


def mean(spent: dict[int, float]) -> float:
    """Milliseconds, the geometric mean over lengths."""
    found = geometric_mean(list(spent.values()))
    assert found is not None
    return found


def shown(tile: Tile) -> str:
    """As it is written in the tables."""
    more = "" if tile.max_registers is None else f", max_registers={tile.max_registers}"
    more += ", in_parts=True" if tile.in_parts else ""
    return f"Tile({tile.block_m}, {tile.block_n}, {tile.num_warps}, {tile.num_stages}{more})"


def backward_entries(found: Times) -> list[str]:
    """Lines for _HOPPER and _APART: dK and dV in one launch or in two, whichever took less."""
    lines = []
    for (kernel, dim), by_mask in found.items():
        if kernel not in ("dq", "dkdv", "dk", "dv") or not all(by_mask.values()):
            continue
        best = [min(by_mask[causal].items(), key=lambda item: mean(item[1])) for causal in (False, True)]
        tiles = ", ".join(shown(ran[0]) for ran, _ in best)
        spent = ", ".join(f"{mean(ms):.3f}" for _, ms in best)
        lines.append(f"_HOPPER[{kernel!r}, {dim}] = ({tiles})  # ms: {spent}")
    for dim in sorted({dim for _, dim in found}):
        alone = [found.get((kernel, dim), {}) for kernel in ("dkdv", "dk", "dv")]
        if not all(x.get(causal) for x in alone for causal in (False, True)):
            continue
        for causal in (False, True):
            joint, dk, dv = (min(map(mean, by_mask[causal].values())) for by_mask in alone)
            ratio = joint / (dk + dv)
            word = "in" if ratio > 1 else "not in"
            lines.append(
                f"({dim}, {causal}) {word} _APART  # one launch takes {ratio:.2f} times as long as two"
            )
    return lines


def pipelined_entries(found: Times) -> list[str]:
    """Entries of _HOPPER_PIPELINED and _HOPPER_PIPELINED_PACKED: a tile, in turns or not, for both masks."""
    lines = []
    for (kernel, dim), by_mask in found.items():
        if kernel not in _PIPELINED:
            continue
        scores = {}
        for tile, turns in itertools.product(
            {tile for ran in by_mask.values() for tile, _ in ran}, (False, True)
        ):
            ways = [way for way in _WAYS if ("turns" in way) == turns]
            runs = [
                [by_mask[c][tile, way] for way in ways if (tile, way) in by_mask[c]] for c in (False, True)
            ]
            if all(runs):
                scores[tile, turns] = mean({i: min(map(mean, x)) for i, x in enumerate(runs)})
        if not scores:
            continue
        (tile, turns), spent = min(scores.items(), key=lambda item: item[1])
        below = _persistent_below(by_mask[True], tile, turns)
        persistent = _persistent_below(by_mask[False], tile, turns) > 0
        table = "_HOPPER_PIPELINED_PACKED" if "packed" in kernel else "_HOPPER_PIPELINED"
        key = f"{dim}" if "packed" in kernel else f"{1 if 'fp8' in kernel else 2}, {dim}"
        entry = f"Pipelined({shown(tile)}, {_FEWEST_KEYS}, {persistent}, {below}, turns={turns})"
        lines.append(f"{table}[{key}] = {entry}  # ms, both masks: {spent:.3f}")
        in_triton = hopper_forward_tile(dim, _FEWEST_KEYS, packed=_FEWEST_KEYS)
        if "packed" in kernel and tile.block_n != in_triton.block_n:
            # What is declared of a packed call must not depend on which kernel takes it.
            lines.append(f"_HOPPER_PACKED[{padded(dim)}] must then hold {tile.block_n} keys from as many on")
    return lines


def _persistent_below(ran: dict[tuple[Tile, str], dict[int, float]], tile: Tile, turns: bool) -> int:
    """The fewest keys from which on a program a tile is faster; 0 where it always is, or alone was timed."""
    way = "-turns" if turns else ""
    each, several = ran.get((tile, way)), ran.get((tile, f"{way}-persistent"))
    if several is None:
        return 0
    if each is None:
        return _ALWAYS
    faster = [length for length in sorted(each) if each[length] <= several[length]]
    slower = [length for length in each if each[length] > several[length]]
    if not slower:
        return 0
    return next((length for length in faster if length > max(slower)), _ALWAYS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.entries", description=__doc__)
    parser.add_argument("file", type=Path, help="what the sweep wrote")
    found = times(json.loads(parser.parse_args().file.read_text()))
    print("\n".join([*backward_entries(found), *pipelined_entries(found)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
