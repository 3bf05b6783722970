"""Names the device in use, and everything else on which its arithmetic may depend."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from pathlib import Path

import torch

import flashcheck
from flashcheck.errors import ArgumentError
from flashcheck.probe.findings import DeviceFinding


def present_device(asked: str | None) -> torch.device:
    """The device asked for, else cuda where it is present, else cpu.

    Raises ArgumentError for a device that is not there.
    """
    present = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    chosen = asked or present[-1]
    if chosen.partition(":")[0] not in present:
        raise ArgumentError("--device", chosen, f"a device that is present: {', '.join(present)}")
    return torch.device(chosen)


def describe_device(device: torch.device) -> DeviceFinding:
    """The device as certificates and caches know it."""
    versions = {
        "flashcheck": flashcheck.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
    }
    try:
        versions["triton"] = importlib.metadata.version("triton")
        from flashcheck.probe.triton_code import interpreted

        triton = "interpreted" if interpreted() else "compiled"
    except ImportError:
        triton = "not installed"
    capability = ""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        versions["cuda"] = str(torch.version.cuda)
    else:
        name = _processor()
    return DeviceFinding(
        kind=device.type,
        name=name,
        capability=capability,
        triton=triton,
        interpreter=_interpreter_digest() if triton == "interpreted" else "",
        versions=versions,
    )


def _processor() -> str:
    """The CPU's product name, with the instruction set that torch chose."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _interpreter_digest() -> str:
    """Changes whenever a method of the interpreter is replaced, as repairs of its arithmetic do."""
    from triton.runtime.interpreter import InterpreterBuilder

    parts = []
    for name, method in sorted(vars(InterpreterBuilder).items()):
        code = getattr(method, "__code__", None)
        if code is not None:
            parts.append(f"{name} {code.co_filename} {code.co_firstlineno} {code.co_code.hex()}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
