"""A badge from a certificate: an SVG of its own, or JSON for an endpoint badge of shields.io."""

from __future__ import annotations

import json
from html import escape

from flashcheck.report.certificate import Certificate

_COLOUR = {"certified": "#11703a", "rejected": "#b3261e", "incomplete": "#8a5a00", "judge failed": "#7a2e9e"}


def badge_message(certificate: Certificate) -> str:
    """The verdict and, where there is one, the dtypes it is about."""
    dtypes = " ".join(certificate.run.dtypes)
    return f"{certificate.verdict} {dtypes}".strip()


def badge_json(certificate: Certificate) -> str:
    """Schema version 1 of shields.io's endpoint badges."""
    data = {
        "schemaVersion": 1,
        "label": "flashcheck",
        "message": badge_message(certificate),
        "color": _COLOUR[certificate.verdict],
    }
    return json.dumps(data) + "\n"


def badge_svg(certificate: Certificate) -> str:
    """A flat badge, 20 pixels high."""
    label, message = "flashcheck", badge_message(certificate)
    left, right = (round(6.6 * len(text)) + 12 for text in (label, message))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{label}: {escape(message)}"><title>{label}: {escape(message)}</title>'
        f'<rect width="{left}" height="20" fill="#444"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{_COLOUR[certificate.verdict]}"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="{left / 2}" y="14">{label}</text>'
        f'<text x="{left + right / 2}" y="14">{escape(message)}</text></g></svg>\n'
    )
