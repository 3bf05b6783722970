"""The page, the Markdown, the badge: complete, self-contained, honest about what was not judged."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from flashcheck.commands.report import run_report
from flashcheck.errors import ArgumentError
from flashcheck.report.badge import badge_json, badge_svg
from flashcheck.report.certificate import Certificate, write
from flashcheck.report.heat import colour, png
from flashcheck.report.html import html_report, side_by_side
from flashcheck.report.markdown import markdown_report
from flashcheck.report.repro import again_command, again_python
from flashcheck.report.svg import Axis, spread

GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "certificates").glob("*.json"))
VOID = {"meta", "link", "br", "img", "input", "hr", "path", "circle", "line", "rect", "image"}


class Page(HTMLParser):
    """Text, links and embedded JSON of a page; unbalanced tags fail."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.references: list[str] = []
        self.embedded: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "action")]
        if tag not in VOID or (tag == "circle" and dict(attrs).get("class", "") != "here"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del tag
        self.references += [v or "" for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.embedded.append(data)
        elif not (self.open and self.open[-1] == "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_page_is_complete_and_loads_nothing(honest: Certificate, rejected: Certificate) -> None:
    text = html_report([("a.json", honest), ("b.json", rejected)])
    page = Page(text)
    assert len(text) < 3e6
    assert all(r.startswith(("#", "data:")) for r in page.references), page.references
    assert not re.search(r"@import|url\(|https?://", text)
    assert [Certificate.from_json(x) for x in page.embedded if x.strip()] == [honest, rejected]


def test_verdict_first_then_bounds_then_gaps_then_pictures(rejected: Certificate) -> None:
    text = Page(html_report([("b.json", rejected)])).text
    order = ("REJECTED", "Error bounds", "Findings", "What was not covered", "Error against bound", "worst")
    places = [text.index(word) for word in order[:-1]]
    assert places == sorted(places)
    for word in (
        "LSE is in base 2",
        f"flashcheck verify b.json --problem {rejected.findings[0].problem_id}",
        "Not declared, so never judged",
        "option softcap",
        "No backward is declared",
        "Margin by length",
        "Margin by head dim",
        "Dtype ladder",
        "which keys the error can come from",
    ):
        assert word in text, word


def test_what_was_not_judged_is_in_plain_sight(honest: Certificate) -> None:
    coverage = honest.coverage.model_copy(
        update={"missing": {"bf16": ["grouped heads"], "fp32": ["the whole dtype"]}}
    )
    c = honest.model_copy(update={"coverage": coverage, "verdict": "incomplete"})
    text = Page(html_report([("a.json", c)])).text
    before_folds = text.split("Coverage:")[0]
    assert "Declared by the kernel and not judged" in before_folds
    assert "bf16: grouped heads" in before_folds
    assert text.count("NOT JUDGED") == 1 + len(honest.coverage.required)
    markdown = markdown_report([("a.json", c)])
    assert "bf16: not judged: grouped heads" in markdown


def test_rows_side_by_side_go_by_dtype_and_direction(honest: Certificate) -> None:
    """Whatever the certificates hold first: one without an LSE before one with it."""
    part = honest.tensors[0]

    def with_(*judged: tuple[str, str]) -> Certificate:
        tensors = [part.model_copy(update={"dtype": dtype, "tensor": tensor}) for dtype, tensor in judged]
        return honest.model_copy(update={"tensors": tensors})

    first = with_(("fp16", "O"), ("fp16", "dQ"), ("bf16", "O"))
    second = with_(("bf16", "LSE"), ("fp16", "LSE"), ("fp32", "O"), ("fp16", "dBias"))
    rows = side_by_side([("a.json", first), ("b.json", second)])
    assert [(row["dtype"], row["tensor"]) for row in rows] == [
        *(("fp16", "O"), ("fp16", "LSE"), ("fp16", "dQ"), ("fp16", "dBias")),
        *(("bf16", "O"), ("bf16", "LSE"), ("fp32", "O")),
    ]
    assert [cell["text"] == "not judged" for cell in rows[1]["cells"]] == [True, False]


def test_hostile_text_stays_text(rejected: Certificate) -> None:
    finding = rejected.findings[0].model_copy(update={"message": "</script><script>alert(1)</script>"})
    page = Page(html_report([("x.json", rejected.model_copy(update={"findings": [finding]}))]))
    assert "</script><script>alert(1)" in page.text
    assert sum(bool(x.strip()) for x in page.embedded) == 1


def test_infinite_margins_can_be_drawn(infinite: Certificate) -> None:
    text = html_report([("x.json", infinite)])
    assert not re.search(r'\b(?:d|x|y|cx|cy|x1|x2|y1|y2|transform)="[^"]*(?:nan|inf)', text)
    Page(text)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_recorded_certificates_have_pages(path: Path) -> None:
    certificate = Certificate.from_json(path.read_text())
    assert certificate.verdict.upper() in Page(html_report([(path.name, certificate)])).text
    assert len(markdown_report([(path.name, certificate)]).splitlines()) < 60


def test_markdown_stays_under_sixty_lines(honest: Certificate, rejected: Certificate) -> None:
    text = markdown_report([("b.json", rejected)])
    assert text.startswith("- ❌ **REJECTED** subject")
    assert "flashcheck verify b.json --problem" in text
    many = rejected.model_copy(update={"findings": rejected.findings * 50, "tensors": rejected.tensors * 40})
    for certificates in ([("x", many)], [("x", many)] * 20, [("x", honest), ("y", many)]):
        lines = markdown_report(certificates).splitlines()
        assert len(lines) < 60
    assert "more findings" in "\n".join(lines)


def test_the_repro_in_python_fails_as_recorded(rejected: Certificate) -> None:
    script = again_python(rejected, rejected.findings[0])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(script, "repro", "exec"), {})
    assert "<Status.FAIL" in out.getvalue()
    assert again_command("my file.json", rejected, rejected.findings[0]).startswith(
        "flashcheck verify 'my file.json' --problem "
    )


def test_badges(honest: Certificate, rejected: Certificate) -> None:
    assert json.loads(badge_json(honest)) == {
        "schemaVersion": 1,
        "label": "flashcheck",
        "message": "certified bf16",
        "color": "#11703a",
    }
    assert "rejected bf16" in badge_svg(rejected)
    assert badge_svg(rejected).startswith("<svg ")


def test_the_command_writes_files_and_prints(tmp_path: Path, honest: Certificate) -> None:
    write(honest, source := tmp_path / "c.json")
    out, err = (Console(file=io.StringIO(), width=200) for _ in range(2))
    page, badge = tmp_path / "r.html", tmp_path / "b.svg"
    assert run_report([source], page, False, badge, out, err) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert badge.exists()
    assert out.file.getvalue() == ""  # type: ignore[attr-defined]
    assert run_report([source], None, False, None, out, err) == 0
    assert "CERTIFIED  subject" in out.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=r"\.svg or \.json"):
        run_report([source], None, False, tmp_path / "b.png", out, err)
    with pytest.raises(ArgumentError, match="one certificate"):
        run_report([source, source], None, False, badge, out, err)


def test_axes_place_what_is_off_the_scale_at_the_edges() -> None:
    axis = Axis(1e-3, 1e3, "x", 10)
    assert [axis.at(x) for x in (0.0, 1e-9, 1.0, 1e9, float("inf"), float("nan"))] == [0, 0, 0.5, 1, 1, 1]
    assert spread([0.0, float("inf"), 0.02, 3.0]) == (0.01, 10.0)
    assert spread([]) == (0.1, 1.0)
    low, high = spread([1e-300, *[1.0] * 50, 1e300], widest=16)
    assert high / low <= 1e17


def test_heat_map_colours() -> None:
    assert colour(0.0) == (255, 255, 255)
    assert colour(1.01) == colour(float("nan")) != colour(1.0)
    image = Image.open(io.BytesIO(png([[(1, 2, 3), (4, 5, 6)]])))
    assert list(image.tobytes()) == [1, 2, 3, 4, 5, 6]


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_opens_it_without_a_complaint(tmp_path: Path, rejected: Certificate) -> None:
    page = tmp_path / "r.html"
    page.write_text(html_report([("b.json", rejected), ("c.json", rejected)]))
    command = [CHROMIUM or "", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=400,900", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    assert "REJECTED" in done.stdout
