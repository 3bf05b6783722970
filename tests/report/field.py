"""The comparison page golden/field/README.md: who is certified for what, out of the committed certificates.

``python -m tests.report.field`` writes it; ``tests.report.edges`` records the edges it shows. Nothing on it
is typed by hand.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashcheck import emulator
from flashcheck.adapters import BUILT_IN
from flashcheck.files import write_atomically
from flashcheck.report.certificate import Certificate, FindingPart, TensorPart, read
from flashcheck.report.terminal import number
from tests.report.edges import EDGES, RECORD

GOLDEN = Path(__file__).parents[2] / "golden"
PAGE = GOLDEN / "field" / "README.md"
FINDINGS = GOLDEN / "findings" / "README.md"
ELSEWHERE = ("kernels-flash_attention.h200.*.json",)
"""Certificates of ``golden/certificates`` that belong on the page: the bundled kernel's on a GPU."""
LINK = "../findings/{}/"
Settled = dict[tuple[str, str, str, str], str]
"""(kernel, dtype, check, tensor or "") -> folder of a finding."""
DTYPES = ("fp16", "bf16", "fp32")
LONGEST = 160
"""Characters of a message that the page shows."""

HEAD = """# In the field: attention kernels that people use, certified

{summary}

Made by `python -m tests.report.field` from the certificates in this folder (`flashcheck report FILE` shows
one, `flashcheck certify KERNEL --level standard` makes one, `flashcheck list kernels` says which are here).

- **certified**: everything that the adapter declares for that dtype was judged, and every element lies inside
  its proved bound. **rejected**: a check failed; the number is the finding that settles it. **incomplete**:
  nothing failed, but something declared was not judged.
- **also found**: faults of that kernel that its certificate does not show
  ([why](#what-a-certificate-does-not-show)).
"""

NUMBERS_HEAD = """## The numbers
- **margin**: share of the proved error that the worst element needs; above 1 the declared arithmetic cannot
  have produced it. **rms**: measured over predicted, the largest of O and of the gradients; `*`: reported,
  not judged.
- A margin says how much of *its own* bound a kernel uses. To compare two kernels with each other, read the
  rms errors: relative to the rms of the exact output, median over ordinary problems.
- **level**: quick judges everything declared once, standard every pair of option values.
"""

UNSEEN_HEAD = """## What a certificate does not show
A certificate is about what the adapter declares, on the problems of its plan. Faults outside of that:
"""

FUZZED_HEAD = """## Fuzzed
`flashcheck fuzz` on one {device}, {many} campaigns side by side (torch {torch}, {date}), from
[golden/fuzz.json](../fuzz.json): problems drawn from all that is declared, climbing toward large margins.
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
the rows that see one and in no other, and for the mean of the values at scale 0. "A hidden key" is the last,
which causality shows to the last row alone.
"""

FINDINGS_HEAD = """## Findings
{count} in kernels and in what they are tested with, each with a repro that stands alone
([index](../findings/README.md)); {known} were known upstream, in full or in part.
"""

FAILED_HEAD = """## Checks that failed in these certificates
| kernel | dtype | check | finding | what it said |
|---|---|---|---|---|
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


def made_with(c: Certificate) -> str:
    """The release of whatever was certified, and the day."""
    name = c.kernel.name
    own = name.startswith("kernels:")  # of this repository: what compiles them counts
    release = f"triton {c.versions['triton']}" if own else " ".join(c.kernel.source.split()[:2])
    release = release.replace(f"{name} ", f"{name.partition('.')[0]} ")
    return f"{release}, {str(c.run.started)[:10]}"


def overview(found: Sequence[tuple[Path, Certificate]]) -> str:
    """A line per kernel and machine: the verdict on each dtype."""
    settled, unseen = settled_findings(), unseen_findings()
    lines = [
        f"| kernel | on | made with | {' | '.join(DTYPES)} | also found |",
        "|---|---|---|" + "---|" * (len(DTYPES) + 1),
    ]
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for _, c in found:
        row = rows.setdefault((c.kernel.name, c.machine.device, made_with(c)), {})
        for dtype in c.run.dtypes:
            row[dtype] = verdict_of(c, dtype) + _reasons(c, dtype, settled)
    for (name, device, release), row in sorted(rows.items()):
        also = ", ".join(_link(one.folder) for one in unseen if one.concerns(name, device)) or "-"
        cells = [f"`{name}`", device, release, *(row.get(dtype, "-") for dtype in DTYPES), also]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def numbers_table(found: Sequence[tuple[Path, Certificate]]) -> str:
    """A line per kernel, back end and dtype."""
    lines = [
        "| kernel | on | dtype | verdict | level | problems | O margin | LSE margin | gradients margin | "
        "O rms | gradients rms | rms error of O |",
        "|---|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
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
                verdict_of(c, dtype),
                c.run.level,
                f"{out[0].cases:,}" if out else "0",
                *(_margin(part) for part in (out, lse, back)),
                *(_rms(part) for part in (out, back)),
                "-" if error is None else f"{error:.2g}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _reasons(c: Certificate, dtype: str, settled: Settled) -> str:
    """Links to the findings that the index names for the failed checks of one dtype of a run."""
    names = [settled_by(c, f, settled) for f in c.findings if f.dtype == dtype]
    links = [_link(name) for name in sorted(set(filter(None, names)))]
    return f" ({', '.join(links)})" if links else ""


def _link(folder: str) -> str:
    return f"[{folder[:3]}]({LINK.format(folder)})"


def settled_findings() -> Settled:
    """The index's table of rejections."""
    pattern = r"^\| `(\S+)` \| (\w+) \| `(\S+)`(?: (\w+))? \| \[\d+\]\((\S+)/\) \|$"
    rows = re.findall(pattern, FINDINGS.read_text(encoding="utf-8"), re.M)
    return {(kernel, dtype, check, tensor): folder for kernel, dtype, check, tensor, folder in rows}


def settled_by(c: Certificate, finding: FindingPart, settled: Settled) -> str | None:
    """The folder of what settles it: that of its tensor ("raised": of a call that raised) before that of the
    whole check."""
    key = (c.kernel.name, finding.dtype, finding.check)
    tensor = finding.where.tensor if finding.where is not None else "raised"
    return settled.get((*key, tensor)) or settled.get((*key, ""))


@dataclass(frozen=True, slots=True)
class Unseen:
    """A finding that certificates of a kernel do not show.

    Attributes:
        kernel: its name; on: "" or the only kind of device where it is so, "CUDA" or "CPU".
        folder: of the finding; why: no certificate shows it.
    """

    kernel: str
    on: str
    folder: str
    why: str

    def concerns(self, kernel: str, device: str) -> bool:
        """Whether it is about certificates of that kernel made there."""
        return kernel == self.kernel and self.on in ("", "CPU" if device == "cpu" else "CUDA")


def unseen_findings() -> list[Unseen]:
    """The index's table of them."""
    text = FINDINGS.read_text(encoding="utf-8")
    part = text[text.index("## Findings that a certificate does not show") :].split("\n## ")[0]
    pattern = r"^\| `(\S+)`(?: on (CUDA|CPU))? \| \[\d+\]\((\S+)/\) \| (.+) \|$"
    return [Unseen(*row) for row in re.findall(pattern, part, re.M)]


def unseen_table() -> str:
    """What stands behind the column "also found"."""
    lines = ["| kernel | finding | why |", "|---|---|---|"]
    for one in unseen_findings():
        where = f" on {one.on}" if one.on else ""
        lines.append(f"| `{one.kernel}`{where} | {_link(one.folder)} | {one.why} |")
    return "\n".join(lines)


def fuzzed() -> str:
    """The campaigns on a GPU that golden/fuzz.json holds."""
    record = json.loads((GOLDEN / "fuzz.json").read_text(encoding="utf-8"))["h200"]
    machine = record["machine"]
    head = FUZZED_HEAD.format(
        device=machine["device"].removeprefix("cuda "),
        many=len(record["campaigns"]),
        torch=machine["torch"],
        date=machine["date"][:10],
    )
    lines = ["| kernel | seconds | problems | worst margin | findings |", "|---|--:|--:|--:|---|"]
    for row in sorted(record["campaigns"], key=lambda row: str(row["kernel"])):
        margins = [float(m) for m in row["worst_margin"].values()]
        named = Counter(finding_name(f) for f in row["findings"])
        said = ", ".join(name if n == 1 else f"{name} ({n} times)" for name, n in named.items()) or "none"
        worst = number(max(margins)) if margins else "-"
        lines.append(f"| `{row['kernel']}` | {row['seconds']:.0f} | {row['cases']:,} | {worst} | {said} |")
    return head + "\n" + "\n".join(lines)


def finding_name(found: dict[str, Any]) -> str:
    """A link to what settles it, or the check that failed and what it turned out to be."""
    what = str(found["is"])
    if (number_ := re.fullmatch(r"golden/findings/(\d{3})", what)) is None:
        return f"`{found['check']}`: {what}"
    (folder,) = FINDINGS.parent.glob(f"{number_[1]}-*")
    return _link(folder.name)


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


def findings_list() -> tuple[str, int, int]:
    """The findings of the index as a list, and how many there are and were known."""
    rows = re.findall(
        r"^\| \[(\d+)\]\((\S+)/\) \| (.+?) \| .+? \| (.+?) \| (.+?) \|$", FINDINGS.read_text(), re.M
    )
    lines = [
        f"- [{n}](../findings/{folder}/) {who}: {what}. Upstream: {known}"
        for n, folder, who, what, known in rows
    ]
    known = sum(not row[4].startswith("no report") for row in rows)
    return "\n".join(lines), len(rows), known


def failed_checks(found: Sequence[tuple[Path, Certificate]]) -> str:
    """What the checks said that failed in these runs, and the finding that settles each."""
    settled = settled_findings()
    lines = []
    for path, c in found:
        for f in c.findings:
            said = " ".join(f.message.split("\n\n")[0].split()).replace("|", "\\|")
            folder = settled_by(c, f, settled)
            which = _link(folder) if folder else "not settled"
            lines.append(
                f"| [{c.kernel.name}]({path.name}) | {f.dtype} | `{f.check}` | {which} | {_short(said)} |"
            )
    return "\n".join(lines)


def _short(text: str) -> str:
    """Its beginning, where it is long."""
    return text if len(text) <= LONGEST else text[: text.rindex(" ", 0, LONGEST)] + " ..."


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
    listed, count, known = findings_list()
    parts = [
        HEAD.format(summary=summary(found)) + "\n" + overview(found),
        "## What the verdicts cover\n" + declared_table(found),
        UNSEEN_HEAD + "\n" + unseen_table(),
        VARIANTS_HEAD + "\n" + variants_table(),
        EDGES_HEAD + "\n" + edges_table(),
        NUMBERS_HEAD + "\n" + numbers_table(found),
        fuzzed(),
        FAILED_HEAD + failed_checks(found),
        FINDINGS_HEAD.format(count=count, known=known) + "\n" + listed,
        "## Adapters without a certificate here\n"
        + without_certificate(found)
        + ": they need a GPU, or a library that "
        "is not installed where these were made (`flashcheck list kernels` says what is missing).",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    write_atomically(PAGE, page())
