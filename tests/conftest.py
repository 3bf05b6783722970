"""Hypothesis profiles of this repository's own tests: nothing that is installed sets one.

``--hypothesis-profile NAME``, else ``ci`` where the variable CI is set, else ``dev``.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

settings.register_profile(
    "ci",  # the same examples every time: a red build is red for everyone
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
# Said outright: where CI is set, Hypothesis' own default is derandomised and without a database.
DATABASE = DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis" / "examples")
settings.register_profile("dev", derandomize=False, database=DATABASE, deadline=None, max_examples=50)
settings.register_profile(
    "nightly",
    derandomize=False,
    database=DATABASE,
    deadline=None,
    max_examples=2000,
    print_blob=True,
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
