"""The report for a person who decides whether to ship: one file, no network, light and dark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from flashcheck import __version__
from flashcheck.report import figures
from flashcheck.report.certificate import Certificate
from flashcheck.report.repro import again_command, again_python
from flashcheck.report.terminal import MEANING, number, place, ratio

Named = Sequence[tuple[str, Certificate]]


def html_report(certificates: Named) -> str:
    """The page for certificates with their files' names, several side by side."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("flashcheck.report"),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    reports = [_report(path, c) for path, c in certificates]
    shorts = _short_names(certificates)
    for report, name in zip(reports, shorts, strict=True):
        report["short_name"] = name
    named = [(f"{c.kernel.name}, {c.machine.device}", c) for _, c in certificates]  # the ladder numbers them
    return environment.get_template("report.html.j2").render(
        title=", ".join(f"{c.kernel.name}: {c.verdict}" for _, c in certificates),
        reports=reports,
        ladder=figures.ladder(named),
        side_by_side=side_by_side(certificates),
        version=__version__,
    )


def _short_names(certificates: Named) -> list[str]:
    """Kernel and device; numbered where that is not enough."""
    names = [f"{c.kernel.name}, {c.machine.device}" for _, c in certificates]
    if len(set(names)) == len(names):
        return names
    return [f"{n + 1}: {name}, {certificates[n][1].run.started[:10]}" for n, name in enumerate(names)]


def side_by_side(certificates: Named) -> list[dict[str, Any]]:
    """A row per dtype and tensor that any of them judged: dtype, tensor, cells (text, css).

    Dtype by dtype, the forward's tensors first.
    """
    judged = dict.fromkeys((t.dtype, t.tensor) for _, c in certificates for t in c.tensors)
    dtypes = list(dict.fromkeys(dtype for dtype, _ in judged))
    rows = []
    for dtype, tensor in sorted(judged, key=lambda key: (dtypes.index(key[0]), key[1].startswith("d"))):
        cells = []
        for _, c in certificates:
            t = next((t for t in c.tensors if (t.dtype, t.tensor) == (dtype, tensor)), None)
            if t is None:
                cells.append({"text": "not judged", "css": "soft"})
            else:
                cells.append({"text": f"{number(t.worst_margin)} · {ratio(t)}", "css": t.verdict})
        rows.append({"dtype": dtype, "tensor": tensor, "cells": cells})
    return rows


def _report(path: str, c: Certificate) -> dict[str, Any]:
    dtypes = list(dict.fromkeys([*c.run.dtypes, *c.coverage.missing]))
    return {
        "path": path,
        "name": c.kernel.name,
        "verdict": c.verdict,
        "verdict_class": c.verdict.replace(" ", "-"),
        "meaning": MEANING[c.verdict],
        "device": c.machine.device,
        "run": c.run,
        "stopped": c.run.stopped,
        "dtypes": dtypes,
        "backward": c.kernel.backward,
        "tensors": [_tensor(c, n) for n in range(len(c.tensors))],
        "findings": [_finding(path, c, n) for n in range(len(c.findings))],
        "finding_names": list(dict.fromkeys(f"{f.check} {f.dtype}" for f in c.findings)),
        "judge_faults": c.judge_faults,
        "missing": c.coverage.missing,
        "missing_count": sum(len(labels) for labels in c.coverage.missing.values()),
        "undeclared": c.coverage.undeclared,
        "matrix": [
            {"label": label, "cells": [_is_covered(c, label, d) for d in dtypes]}
            for label in c.coverage.required
        ],
        "checks": _checks(c, dtypes),
        "pairs": figures.pairs_of(c),
        "heats": figures.heat_maps(c),
        "facts": _facts(c),
        "arithmetic": {d: _words(a) for d, a in c.kernel.arithmetic.items()},
        # "</" would end the script element that holds it.
        "json": json.dumps(json.loads(c.to_json()), separators=(",", ":")).replace("</", "<\\/"),
    }


def _is_covered(c: Certificate, label: str, dtype: str) -> bool:
    missing = c.coverage.missing.get(dtype, [])
    return dtype in c.run.dtypes and label not in missing


def _tensor(c: Certificate, n: int) -> dict[str, str]:
    t = c.tensors[n]
    return {
        "dtype": t.dtype,
        "tensor": t.tensor,
        "cases": f"{t.cases:,}",
        "elements": f"{t.elements:,}",
        "over": f"{t.over_bound:,}",
        "margin": number(t.worst_margin),
        "rms": ratio(t),
        "special": f"{t.special_passed}/{t.special_total}",
        "verdict": t.verdict,
        "place": place(t, c.problems),
    }


def _finding(path: str, c: Certificate, n: int) -> dict[str, Any]:
    f = c.findings[n]
    where = ""
    if f.where is not None:
        index = ",".join(map(str, f.where.index))
        where = f"{f.where.tensor}[{index}] got {f.where.got}, exact {f.where.exact}, accepted up to "
        where += f"{f.where.bound:.3g}"
    return {
        "check": f.check,
        "dtype": f.dtype,
        "message": f.message,
        "cases": f.cases,
        "where": where,
        "evidence": f.evidence,
        "likely": f.likely,
        "problem": f.problem,
        "command": again_command(path, c, f),
        "python": again_python(c, f),
    }


def _checks(c: Certificate, dtypes: list[str]) -> list[dict[str, Any]]:
    known = {(part.check, part.dtype): part for part in c.checks}
    rows = []
    for name in dict.fromkeys(part.check for part in c.checks):
        cells = []
        for dtype in dtypes:
            part = known.get((name, dtype))
            if part is None or part.passed + part.failed == 0:
                cells.append({"text": "–", "css": "soft"})
            else:
                text = f"{part.passed:,}/{part.passed + part.failed:,}"
                cells.append({"text": text, "css": "fail" if part.failed else "pass"})
        rows.append({"name": name, "cells": cells})
    return rows


def _facts(c: Certificate) -> list[tuple[str, str]]:
    facts = [
        ("kernel", c.kernel.load_name or c.kernel.name),
        ("source", c.kernel.source),
        ("source SHA-256", c.kernel.source_sha256),
        ("platform", c.machine.platform),
        ("processor", c.machine.processor),
        ("machine model", _words(c.machine.model)),
        ("probed", "no" if c.machine.probe is None else _words(c.machine.probe)),
        ("seed", str(c.run.seed)),
        ("seconds", ", ".join(f"{d} {s:.1f}" for d, s in c.run.durations.items()) or f"{c.run.seconds:.1f}"),
        ("capabilities", _words(c.kernel.capabilities)),
    ]
    return [*facts, *((f"{name} version", version) for name, version in c.versions.items())]


def _words(data: dict[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in data.items())
