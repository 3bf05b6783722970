"""Proved elementwise error bounds and predicted rms errors. THEORY.md derives every term."""
