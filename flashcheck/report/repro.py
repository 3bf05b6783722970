"""How a reader runs a finding again: a command, and a few lines of Python."""

from __future__ import annotations

import shlex

from flashcheck.report.certificate import Certificate, FindingPart


def again_command(path: str, certificate: Certificate, finding: FindingPart) -> str:
    """``flashcheck verify CERT --problem ID``; the whole run where a group of problems was judged."""
    if finding.problem_id is None or not certificate.kernel.load_name:
        return certificate.run.command
    return shlex.join(["flashcheck", "verify", path, "--problem", finding.problem_id])


def again_python(certificate: Certificate, finding: FindingPart) -> str:
    """A script that needs nothing but the kernel and this package; empty for a group of problems."""
    if finding.problem_id is None or not certificate.kernel.load_name:
        return ""
    spec = certificate.problems[finding.problem_id]
    return "\n".join(
        [
            "from flashcheck.checks import CHECKS",
            "from flashcheck.devices import choose_device, interpret_without_gpu",
            "from flashcheck.inputs.spec import ProblemSpec",
            "from flashcheck.loading import load",
            "",
            "interpret_without_gpu()",
            f"kernel = load({certificate.kernel.load_name!r})",
            f"problem = ProblemSpec.from_json({spec!r}).build()",
            f"print(CHECKS[{finding.check!r}](kernel, problem, choose_device(None, kernel)))",
        ]
    )
