"""The comparison page says what the committed files say; every finding has what its index promises."""

from __future__ import annotations

import re
import sys

import pytest

from flashcheck.adapters import BUILT_IN
from flashcheck.loading import load
from tests.report import edges, field


def test_the_page_is_what_the_files_say() -> None:
    assert field.PAGE.read_text(encoding="utf-8") == field.page(), (
        "write it anew: python -m tests.report.field"
    )


def test_verdicts_go_by_dtype() -> None:
    """A finding in one dtype does not reject the others of the run."""
    _, c = field.certificates()[0]
    dtype, other = c.run.dtypes[:2]
    assert field.verdict_of(c.model_copy(update={"findings": []}), dtype) == "certified"
    missing = c.coverage.model_copy(update={"missing": {dtype: ["option mask"]}})
    cut = c.model_copy(update={"coverage": missing, "findings": []})
    assert [field.verdict_of(cut, d) for d in (dtype, other)] == ["incomplete", "certified"]
    bad = [t.model_copy(update={"verdict": "fail"}) if t.dtype == dtype else t for t in c.tensors]
    rejected = c.model_copy(update={"tensors": bad, "findings": []})
    assert [field.verdict_of(rejected, d) for d in (dtype, other)] == ["rejected", "certified"]


def test_every_failed_check_is_settled_by_a_finding() -> None:
    settled = field.settled_findings()
    failed = [(c, f) for _, c in field.certificates() for f in c.findings]
    assert failed
    unsettled = {
        (c.kernel.name, f.dtype, f.check) for c, f in failed if field.settled_by(c, f, settled) is None
    }
    assert not unsettled


def test_a_check_that_failed_for_two_reasons_has_two_findings() -> None:
    c, finding = next((c, f) for _, c in field.certificates() for f in c.findings if f.where is not None)
    assert finding.where is not None
    key = (c.kernel.name, finding.dtype, finding.check)
    raised = finding.model_copy(update={"where": None})
    settled = {
        (*key, ""): "001-any",
        (*key, finding.where.tensor): "002-tensor",
        (*key, "raised"): "003-raised",
    }
    assert field.settled_by(c, finding, settled) == "002-tensor"
    assert field.settled_by(c, raised, settled) == "003-raised"
    del settled[(*key, "raised")]
    assert field.settled_by(c, raised, settled) == "001-any"
    assert field.settled_by(c, raised, {(*key, finding.where.tensor): "002-tensor"}) is None


def test_what_certificates_do_not_show_is_about_kernels_and_findings_that_exist() -> None:
    text = field.FINDINGS.read_text(encoding="utf-8")
    unseen = field.unseen_findings()
    part = text[text.index("## Findings that a certificate does not show") :].split("\n## ")[0]
    assert len(unseen) == part.count("\n| `")  # none is lost to its spelling
    rows = [line.split(" | ") for line in field.overview(field.certificates()).splitlines()[2:]]
    for one in unseen:
        assert one.kernel in BUILT_IN
        assert one.folder in {p.name for p in FOLDERS}
        for kernel, device, *_, also in rows:
            concerns = one.concerns(kernel.strip("| `"), device)
            assert (f"({field.LINK.format(one.folder)})" in also) == concerns or kernel != f"| `{one.kernel}`"
    assert [
        [field.Unseen("k", on, "001-x", "").concerns("k", device) for device in ("cpu", "NVIDIA H200")]
        for on in ("", "CPU", "CUDA")
    ] == [[True, True], [True, False], [False, True]]


FOLDERS = sorted(p for p in field.FINDINGS.parent.iterdir() if p.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name[:3])
def test_a_finding_has_an_entry_a_repro_and_its_output(folder) -> None:  # type: ignore[no-untyped-def]
    assert f"]({folder.name}/)" in field.FINDINGS.read_text(encoding="utf-8")
    for name in ("README.md", "repro.py", "output.txt"):
        assert (folder / name).stat().st_size > 0, name
    code = (folder / "repro.py").read_text(encoding="utf-8")
    imports = set(re.findall(r"^(?:import|from) (\w+)", code, re.M))
    assert imports <= sys.stdlib_module_names | {"torch", "triton", "jax", "flash_attn"}  # it stands alone


def test_the_edges_of_an_honest_kernel_are_the_contract_s() -> None:
    said = edges.observed(load("emulator.flash.bf16"))
    assert said == {
        "empty row": "O 0, LSE -inf",
        "scores to 1e4": "right",
        "scores past fp32": "NaN",
        "NaN in q": "its row NaN, others unchanged",
        "NaN in a hidden key": "last row NaN, others unchanged",
        "scale 0": "right",
        "subnormal v": "kept",
    }
