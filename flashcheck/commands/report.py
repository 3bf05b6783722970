"""Certificates as pages, Markdown and badges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flashcheck.commands.compare import print_plain
from flashcheck.errors import ArgumentError
from flashcheck.files import write_atomically
from flashcheck.report.certificate import read
from flashcheck.report.terminal import print_certificate, print_ending


def run_report(
    paths: Sequence[Path],
    html: Path | None,
    markdown: bool,
    badge: Path | None,
    stdout: Console,
    stderr: Console,
) -> int:
    """0 once everything is written; without an option the certificates are printed."""
    certificates = [(str(path), read(path)) for path in paths]
    if badge is not None and len(certificates) > 1:
        raise ArgumentError("--badge", str(badge), f"one certificate, not {len(certificates)}")
    if badge is not None and badge.suffix not in (".svg", ".json"):
        raise ArgumentError("--badge", str(badge), "a file that ends in .svg or .json")
    if html is not None:
        from flashcheck.report.html import html_report

        write_atomically(html, html_report(certificates))
        stderr.print(f"wrote {html}, {html.stat().st_size / 1e6:.2f} MB", highlight=False, soft_wrap=True)
    if badge is not None:
        from flashcheck.report.badge import badge_json, badge_svg

        make = badge_json if badge.suffix == ".json" else badge_svg
        write_atomically(badge, make(certificates[0][1]))
        stderr.print(f"wrote {badge}", highlight=False, soft_wrap=True)
    if markdown:
        from flashcheck.report.markdown import markdown_report

        print_plain(stdout, markdown_report(certificates).rstrip())
    elif html is None and badge is None:
        for path, certificate in certificates:
            print_certificate(stdout, certificate)
            print_ending(stdout, certificate, path)
    return 0
