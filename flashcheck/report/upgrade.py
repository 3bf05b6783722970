"""Older certificates become current ones; what they never recorded stays empty."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def problem_id(spec: dict[str, Any]) -> str:
    """Twelve hex digits of the SHA-256 of a problem spec's canonical JSON."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def upgraded(data: Any) -> Any:
    """``data`` in the current format; what is no certificate of a known older format is returned as it is."""
    if isinstance(data, dict) and data.get("format_version") == 1:
        return _from_1(data)
    return data


def _from_1(old: dict[str, Any]) -> dict[str, Any]:
    """Specs stood where they were used; there were no points, histograms, pictures or durations."""
    new = {**old, "format_version": 2, "problems": {}, "pictures": []}

    def known(spec: dict[str, Any] | None) -> str | None:
        if spec is None:
            return None
        new["problems"][problem_id(spec)] = spec
        return problem_id(spec)

    tensors = old.get("tensors", [])
    new["tensors"] = [
        {
            **t,
            "worst_problem": known(t["worst_problem"]),
            "worst_inputs_sha256": None,
            "rms_error": None,
            "rms_predicted": None,
            "histogram": None,
            "points": None,
        }
        for t in tensors
    ]
    new["findings"] = [
        {key: value for key, value in f.items() if key != "spec"} | {"problem_id": known(f.get("spec"))}
        for f in old.get("findings", [])
    ]
    words = old["run"]["command"].split()  # flashcheck certify NAME ...
    new["kernel"] = {
        **old["kernel"],
        "load_name": words[2] if len(words) > 2 else "",
        "backward": any(t["tensor"].startswith("d") for t in tensors),
    }
    new["coverage"] = {**old["coverage"], "undeclared": []}
    new["run"] = {**old["run"], "durations": {}}
    return new
