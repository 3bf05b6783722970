"""What the plugin knows in one pytest process."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from flashcheck.pytest_plugin.options import Options, options_from

if TYPE_CHECKING:
    import pytest


class Session:
    """Options, the folder where xdist's workers share results, and which worker this is.

    Attributes:
        folder: made when the first result is written; the controller removes it.
        used: some test of this run judges a kernel.
        objects: kernels that the ``certify`` fixture was given.
        groups_of_xdist: tests are to be marked so that ``--dist loadgroup`` keeps a group on one worker.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.options: Options = options_from(config)
        self.root = config.rootpath
        worker = getattr(config, "workerinput", None)
        self.is_worker = worker is not None
        self.worker_number = int(worker["workerid"].removeprefix("gw")) if worker else 0
        name = f"flashcheck-{uuid.uuid4().hex}"
        self.folder = Path(worker["flashcheck_folder"] if worker else Path(tempfile.gettempdir()) / name)
        self.used = False
        self.objects: list[object] = []
        self.groups_of_xdist = config.pluginmanager.hasplugin("xdist")
