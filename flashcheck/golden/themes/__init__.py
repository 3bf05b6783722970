"""The groups of problems; importing this package registers all of them, in the order of the files."""

from __future__ import annotations

from flashcheck.golden.themes import ordinary, options, logits, rows, values, edges, combined  # isort: skip

__all__ = ["combined", "edges", "logits", "options", "ordinary", "rows", "values"]
