"""The comparison page golden/field/README.md: who is certified for what, out of the committed certificates.

``python -m tests.report.field`` writes it; ``tests.report.edges`` records the edges it shows. Nothing on it
is typed by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from flashcheck import emulator
from flashcheck.adapters import BUILT_IN
from flashcheck.files import write_atomically
from flashcheck.report.certificate import Certificate, TensorPart, read
from flashcheck.report.terminal import number
from tests.report.edges import EDGES, RECORD

GOLDEN = Path(__file__).parents[2] / "golden"
PAGE = GOLDEN / "field" / "README.md"
FINDINGS = GOLDEN / "findings" / "README.md"
ELSEWHERE = ("kernels-flash_attention.h200.*.json",)
"""Certificates of ``golden/certificates`` that belong on the page: the bundled kernel's on a GPU."""

HEAD = """# In the field: attention kernels that people use, certified

{summary}

Made by `python -m tests.report.field` from the certificates in this folder (`flashcheck report FILE` shows
one, `flashcheck certify KERNEL --level standard` makes one). A row is one dtype on one back end, and its
verdict is on that dtype: a certificate of some of the declared dtypes calls itself incomplete as a whole.

- **margin**: share of the proved error that the worst element needs; above 1 the declared arithmetic cannot
  have produced it. **rms**: measured over predicted, the largest of O and of the gradients; `*`: reported,
  not judged.
- A margin says how much of *its own* bound a kernel uses. To compare two kernels with each other, read the
  rms errors: relative to the rms of the exact output, median over ordinary problems.
- **level**: quick judges everything declared once, standard every pair of option values.
- The versions behind a row stand in its certificate.
"""

VARIANTS_HEAD = """## What kernels promise instead
Where a kernel's own documentation or source promises something else than the contract, that is a declared
variant and not a failure: the adapter declares it, and the certificate is about the rest. What is not
declared stands in the table above; facts that need more words:
"""

EDGES_HEAD = """## At the contract's edges
What kernels do with one head of 32 bf16 queries and keys, declared or not
(`python -m tests.report.edges KERNEL`); a kernel is judged there only where it declares the edge. The
contract asks for O = 0 and LSE = -inf in an empty row, for the right number, inf or NaN past fp32, for NaN in
the rows that see one and in no other, and for the mean of the values at scale 0.
"""

FINDINGS_HEAD = """## Findings
{count} in kernels and in what they are tested with, each with a repro that stands alone
([index](../findings/README.md)); {known} were known upstream, in full or in part.
"""


def certificates() -> list[tuple[Path, Certificate]]:
    """Those of golden/field, then the bundled kernel's, by name."""
    paths = [p for p in sorted((GOLDEN / "field").glob("*.json")) if p != RECORD]
    paths += [p for pattern in ELSEWHERE for p in sorted((GOLDEN / "certificates").glob(pattern))]
    return [(path, read(path)) for path in paths]


def verdict_of(c: Certificate, dtype: str) -> str:
    """The verdict on one dtype of a run."""
    if c.verdict == "judge failed":
        return c.verdict
    tensors = [t for t in c.tensors if t.dtype == dtype]
    if any(f.dtype == dtype for f in c.findings) or any(t.verdict == "fail" for t in tensors):
        return "rejected"
    return "incomplete" if c.coverage.missing.get(dtype) or c.run.stopped or not tensors else "certified"


def _margin(tensors: Sequence[TensorPart]) -> str:
    return number(max(t.worst_margin for t in tensors)) if tensors else "-"


def _rms(tensors: Sequence[TensorPart]) -> str:
    """The largest ratio; judged ones go before those that are information only."""
    judged = [t.rms_ratio for t in tensors if t.rms_ratio is not None and t.rms_judged]
    shown = [t.rms_ratio for t in tensors if t.rms_ratio is not None]
    if judged:
        return number(max(judged))
    return f"{number(max(shown))} *" if shown else "-"


def verdicts_table(found: Sequence[tuple[Path, Certificate]]) -> str:
    """A line per kernel, back end and dtype."""
    lines = [
        "| kernel | on | dtype | verdict | level | problems | O margin | LSE margin | gradients margin | "
        "O rms | gradients rms | rms error of O |",
        "|---|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    settled = settled_findings()
    for path, c in found:
        link = path.name if path.parent == PAGE.parent else f"../certificates/{path.name}"
        for dtype in c.run.dtypes:
            tensors = {t.tensor: t for t in c.tensors if t.dtype == dtype}
            out, lse = ([tensors[n]] if n in tensors else [] for n in ("O", "LSE"))
            back = [t for n, t in tensors.items() if n.startswith("d")]
            error = out[0].rms_error if out else None
            cells = [
                f"[{c.kernel.name}]({link})",
                c.machine.device,
                dtype,
                verdict_of(c, dtype) + _reasons(c, dtype, settled),
                c.run.level,
                f"{out[0].cases:,}" if out else "0",
                *(_margin(part) for part in (out, lse, back)),
                *(_rms(part) for part in (out, back)),
                "-" if error is None else f"{error:.2g}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _reasons(c: Certificate, dtype: str, settled: dict[tuple[str, str, str], str]) -> str:
    """Links to the findings that the index names for the failed checks of one dtype of a run."""
    names = [settled.get((c.kernel.name, dtype, f.check)) for f in c.findings if f.dtype == dtype]
    links = [f"[{name[:3]}](../findings/{name}/)" for name in dict.fromkeys(filter(None, names))]
    return f" ({', '.join(links)})" if links else ""


def settled_findings() -> dict[tuple[str, str, str], str]:
    """(kernel, dtype, check) -> folder of the finding, from the index's table of rejections."""
    rows = re.findall(r"^\| `(\S+)` \| (\w+) \| `(\S+)` \| \[\d+\]\((\S+)/\) \|$", FINDINGS.read_text(), re.M)
    return {(kernel, dtype, check): folder for kernel, dtype, check, folder in rows}


def variants_table() -> str:
    """The index's facts that are no faults, as they stand there."""
    text = FINDINGS.read_text(encoding="utf-8")
    rows = text[text.index("## Facts that are no faults") :].split("\n\n")[1]
    assert rows.startswith("| kernel | fact |")
    return rows.rstrip()


def declared_table(found: Sequence[tuple[Path, Certificate]]) -> str:
    """What the verdicts cover: directions and options, and what a kernel does not declare."""
    lines = ["| kernel | directions | options | not declared, so not judged |", "|---|---|---|---|"]
    seen = set()
    for _, c in found:
        if c.kernel.name in seen:
            continue
        seen.add(c.kernel.name)
        options = ", ".join(c.kernel.capabilities["options"])
        absent = [word for word in c.coverage.undeclared if not word.startswith("option ")]
        directions = "forward, backward" if c.kernel.backward else "forward"
        lines.append(f"| {c.kernel.name} | {directions} | {options} | {', '.join(absent) or '-'} |")
    return "\n".join(lines)


def edges_table() -> str:
    """A line per kernel: what it does at each edge."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = ["| kernel | " + " | ".join(EDGES) + " |", "|---|" + "---|" * len(EDGES)]
    for name, entry in record.items():
        said = " | ".join(entry["edges"].get(edge, "-") for edge in EDGES)
        lines.append(f"| {name.removesuffix(' on cuda')} ({entry['device']}) | {said} |")
    return "\n".join(lines)


def findings_lists(found: Sequence[tuple[Path, Certificate]]) -> tuple[str, int, int]:
    """The findings of the index as a list, and how many there are and were known; what these runs found."""
    rows = re.findall(
        r"^\| \[(\d+)\]\((\S+)/\) \| (.+?) \| .+? \| (.+?) \| (.+?) \|$", FINDINGS.read_text(), re.M
    )
    lines = [
        f"- [{n}](../findings/{folder}/) {who}: {what}. Upstream: {known}"
        for n, folder, who, what, known in rows
    ]
    known = sum(not row[4].startswith("no report") for row in rows)
    for path, c in found:
        for f in c.findings:
            said = " ".join(f.message.split("\n\n")[0].split())
            lines.append(f"- [{c.kernel.name}]({path.name}) {f.dtype}, `{f.check}`: {said}")
    return "\n".join(lines), len(rows), known


def without_certificate(found: Sequence[tuple[Path, Certificate]]) -> str:
    """Adapters that have no certificate here."""
    have = {c.kernel.name for _, c in found}
    names = [f"`{name}`" for name in BUILT_IN if name not in have and name not in emulator.KERNELS]
    return ", ".join(names)


def summary(found: Sequence[tuple[Path, Certificate]]) -> str:
    """How many kernels x back ends x dtypes have which verdict."""
    verdicts = [verdict_of(c, dtype) for _, c in found for dtype in c.run.dtypes]
    kernels = {c.kernel.name for _, c in found}
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(sorted(verdicts)))
    return f"**{len(verdicts)} verdicts** on {len(kernels)} kernels (kernel x back end x dtype): {counts}."


def page() -> str:
    """The page's text."""
    found = certificates()
    listed, count, known = findings_lists(found)
    parts = [
        HEAD.format(summary=summary(found)) + "\n" + verdicts_table(found),
        "## What the verdicts cover\n" + declared_table(found),
        VARIANTS_HEAD + "\n" + variants_table(),
        EDGES_HEAD + "\n" + edges_table(),
        FINDINGS_HEAD.format(count=count, known=known) + "\n" + listed,
        "## Adapters without a certificate here\n"
        + without_certificate(found)
        + ": they need a GPU, or a library that "
        "is not installed where these were made (`flashcheck list kernels` says what is missing).",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    write_atomically(PAGE, page())
