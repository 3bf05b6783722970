"""The files of golden/: JSON, a small binary twin, one safetensors file, a manifest."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashcheck.errors import ArgumentError
from flashcheck.golden.entry import FLAGS, GROUPS
from flashcheck.golden.limits import named_arithmetics
from flashcheck.golden.record import FORMAT_VERSION, INTEGER_INPUTS

Data = dict[str, Any]

MANIFEST = "manifest.json"
SAFETENSORS = "vectors/golden.safetensors"
MAGIC = b"FCGOLD1\n"

CODES = {"fp64": 0, "fp32": 1, "fp16": 2, "bf16": 3, "e4m3": 4, "e5m2": 5, "bool": 6, "int64": 7}
"""Format bytes of the binary twin."""

_SAFE = {
    "fp64": "F64",
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
    "e4m3": "F8_E4M3",
    "e5m2": "F8_E5M2",
    "bool": "BOOL",
    "int64": "I64",
}
_CAUSAL = {None: 0, "top_left": 1, "bottom_right": 2}
_NO_LIMIT = -1

Array = tuple[str, list[int], bytes]
"""(format, shape, little-endian bytes)."""


def group_data(name: str, problems: list[Data]) -> Data:
    """A group's file."""
    used = {flag for p in problems for flag in p["flags"]}
    formats = {p["inputs"]["q"]["format"] for p in problems}
    return {
        "format_version": FORMAT_VERSION,
        "group": name,
        "about": GROUPS[name].about,
        "flags": {flag: meaning for flag, meaning in FLAGS.items() if flag in used},
        "arithmetics": {
            named.name: {"arithmetic": named.variants[0].describe(), "machine": named.machine.describe()}
            for fmt in _formats()
            if fmt.name in formats
            for named in named_arithmetics(fmt)
        },
        "problems": problems,
    }


def _formats() -> tuple[Any, ...]:
    from flashcheck.golden.entry import FORMATS

    return FORMATS


def to_text(data: Data) -> str:
    """One line per field of a problem: diffs stay readable, and any JSON reader takes it."""
    head = {key: value for key, value in data.items() if key != "problems"}
    lines = [json.dumps(head, ensure_ascii=False)[:-1] + ', "problems": [']
    for n, problem in enumerate(data["problems"]):
        fields = ",\n".join(
            f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in problem.items()
        )
        lines.append("{\n" + fields + "\n}" + ("," if n + 1 < len(data["problems"]) else ""))
    return "\n".join(lines) + "\n]}\n"


def arrays(problem: Data) -> dict[str, Array]:
    """Everything numeric of a problem by name: inputs, options, stored, expected (``out.fp64``, ...)."""
    found: dict[str, Array] = {}
    for name, x in problem["inputs"].items():
        found[name] = (x["format"], x["shape"], bytes.fromhex(x["bits"]))
    options = problem["options"]
    found["effective_scale"] = _number(options["effective_scale"])
    for name in ("softcap", "q_descale", "k_descale", "v_descale"):
        if options[name] not in (None, 1.0) or (name == "softcap" and options[name] is not None):
            found[name] = _number(options[name])
    if options["causal"] is not None:
        found["causal"] = _integers([_CAUSAL[options["causal"]]])
    if options["window"] is not None:
        found["window"] = _integers([_NO_LIMIT if x is None else x for x in options["window"]])
    for name in INTEGER_INPUTS:
        if options[name] is not None:
            found[name] = _integers(options[name])
    for name, x in problem.get("stored", {}).items():
        found[f"stored.{name}"] = (x["format"], x["shape"], bytes.fromhex(x["bits"]))
    for name, x in problem["expected"].items():
        for fmt in ("fp64", "fp32", "fp16", "bf16"):
            found[f"{name}.{fmt}"] = (fmt, x["shape"], bytes.fromhex(x[fmt]))
        for arithmetic, bits in x["bounds"].items():
            found[f"{name}.bound.{arithmetic}"] = ("bf16", x["shape"], bytes.fromhex(bits))
    return found


def _number(x: float) -> Array:
    return "fp64", [], struct.pack("<d", x)


def _integers(values: list[int]) -> Array:
    return "int64", [len(values)], struct.pack(f"<{len(values)}q", *values)


def to_binary(problems: list[Data]) -> bytes:
    """The binary twin of a group (layout: golden/README.md); without roundings to fp32, fp16 and bf16."""
    parts = [MAGIC, struct.pack("<I", len(problems))]
    for problem in problems:
        chosen = {
            name: x
            for name, x in arrays(problem).items()
            if not name.endswith((".fp32", ".fp16", ".bf16")) or ".bound." in name
        }
        parts += [_text(problem["id"]), struct.pack("<I", len(chosen))]
        for name, (fmt, shape, raw) in chosen.items():
            parts += [_text(name), struct.pack(f"<BB{len(shape)}I", CODES[fmt], len(shape), *shape)]
            parts += [struct.pack("<I", len(raw)), raw]
    return b"".join(parts)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<H", len(raw)) + raw


def to_safetensors(groups: Mapping[str, list[Data]]) -> bytes:
    """All arrays of all problems, named ``<problem id>/<array>``."""
    header: Data = {"__metadata__": {"format_version": str(FORMAT_VERSION)}}
    parts: list[bytes] = []
    offset = 0
    for problems in groups.values():
        for problem in problems:
            for name, (fmt, shape, raw) in arrays(problem).items():
                span = [offset, offset + len(raw)]
                header[f"{problem['id']}/{name}"] = {
                    "dtype": _SAFE[fmt],
                    "shape": shape,
                    "data_offsets": span,
                }
                offset += len(raw)
                parts.append(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def group_path(folder: Path, name: str) -> Path:
    return folder / "vectors" / f"{name}.json"


def read_group(folder: Path, name: str) -> Data:
    """A group's file; raises ArgumentError where there is none."""
    path = group_path(folder, name)
    if not path.is_file():
        raise ArgumentError(
            "--folder", str(folder), f"a folder with vectors/{name}.json: flashcheck golden make"
        )
    data: Data = json.loads(path.read_text(encoding="utf-8"))
    return data


def manifest(folder: Path, counts: Mapping[str, int]) -> Data:
    """Size and SHA-256 of every file, and how many problems each group has."""
    paths = sorted(p for p in (folder / "vectors").iterdir() if not p.name.startswith("."))
    return {
        "format_version": FORMAT_VERSION,
        "problems": sum(counts.values()),
        "groups": dict(counts),
        "files": {
            f"vectors/{p.name}": {"bytes": p.stat().st_size, "sha256": _sha256(p.read_bytes())} for p in paths
        },
    }


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def damaged(folder: Path) -> Iterator[str]:
    """Files that differ from the manifest, one line each; raises ArgumentError where there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ArgumentError("--folder", str(folder), f"a folder with {MANIFEST}: flashcheck golden make")
    listed = json.loads(path.read_text(encoding="utf-8"))["files"]
    for name, facts in listed.items():
        path = folder / name
        if not path.is_file():
            yield f"{name}: missing"
        elif _sha256(path.read_bytes()) != facts["sha256"]:
            yield f"{name}: its SHA-256 is not the manifest's"
