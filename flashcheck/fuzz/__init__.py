"""Hunts for failures until a budget ends: `flashcheck fuzz`, `flashcheck replay`.

Files to know: ``case`` (one problem as data), ``judge`` (a case in, a report out), ``runner`` (the process
that runs kernels and may die), ``hunter`` (Hypothesis, one shard at a time), ``reduce`` (the simplest
tensors), ``store`` (the campaign's directory), ``campaign`` (workers and budget), ``script`` (repros).
"""
