"""How a pytest that a test starts gets the plugin."""

from importlib.metadata import entry_points

_INSTALLED = any(e.value == "flashcheck.pytest_plugin" for e in entry_points(group="pytest11"))

LOAD_PLUGIN = () if _INSTALLED else ("-p", "flashcheck.pytest_plugin")
"""Where the package is installed its entry point loads the plugin, and naming it again is an error."""
