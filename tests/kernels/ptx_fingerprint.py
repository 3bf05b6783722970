"""What the compiler makes of the kernels, as hashes: to show that a change of their source changes no code.

Register and label numbers, comments and line information are left out; every instruction and its order count.
"""

import hashlib
import json
import re

_NAMES = re.compile(r"%[a-z]+\d+|\$L__\w+")
_NO_CODE = (".loc", ".file", ".reg", "//")


def normalised(ptx):
    """The instructions of a PTX text, registers and labels numbered in the order of their appearance."""
    lines = (line.split("//")[0].strip() for line in ptx.split(".section")[0].splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith(_NO_CODE))
    names: dict[str, str] = {}

    def number(match):
        kind = match[0].rstrip("0123456789") if match[0].startswith("%") else "$"
        return names.setdefault(match[0], f"{kind}_{len(names)}")

    return _NAMES.sub(number, text)


def fingerprints(compiled):
    """(kernel, hash) of each compiled kernel, in order."""
    return [(k.name, hashlib.sha256(normalised(k.asm["ptx"]).encode()).hexdigest()[:16]) for k in compiled]


def changed(compiled, path):
    """Kernels whose code is not what the file at ``path`` says, as text; empty where all is the same."""
    before, now = [tuple(x) for x in json.loads(path.read_text())], fingerprints(compiled)
    found = [] if len(before) == len(now) else [f"{len(before)} kernels before, {len(now)} now"]
    pairs = enumerate(zip(before, now, strict=False))
    return found + [f"launch {i}: {a[0]} {a[1]} before, {b[0]} {b[1]} now" for i, (a, b) in pairs if a != b]
