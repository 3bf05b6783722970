"""How a pytest that a test starts gets the plugin.

Triton is imported here, before pytester looks: it forgets what tests import, and an extension module that is
then imported once more ends the process.
"""

from importlib.metadata import entry_points

import triton  # noqa: F401

_INSTALLED = any(e.value == "flashcheck.pytest_plugin" for e in entry_points(group="pytest11"))

LOAD_PLUGIN = () if _INSTALLED else ("-p", "flashcheck.pytest_plugin")
"""Where the package is installed its entry point loads the plugin, and naming it again is an error."""
