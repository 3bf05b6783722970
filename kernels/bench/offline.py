"""Compiling for Hopper without a GPU: what the assembler makes of a launch configuration."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_REGISTER_FILE, _SHARED_MEMORY = 65536, 228 * 1024  # of a multiprocessor; a program takes 1 KiB more


class NoDriver:
    """What compilation asks of a driver; a launch is never made."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0


def compile_only() -> list[Any]:
    """From here on, launches of this process compile for sm90 and do not run; the list collects results."""
    triton.runtime.driver.set_active(NoDriver())
    run, compiled = JITFunction.run, []

    def warm_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        compiled.append(kernel)
        return kernel

    def launched_again(self: Any, _grid: Any) -> Callable[..., None]:
        return lambda *_arguments: compiled.append(self)

    JITFunction.run = warm_up
    CompiledKernel.__getitem__ = launched_again
    return compiled


def resources(kernel: Any) -> dict[str, int]:
    """Registers, stack bytes and shared memory of a compiled kernel, and counts of telling instructions.

    "waits" in the tens beside "spills" means that wgmma was serialised. Empty where Triton's package has no
    disassembler.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        Path(path).write_bytes(kernel.asm["cubin"])
        usage, code = _tool("cuobjdump", "-res-usage", path), _tool("nvdisasm", path)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        return {}
    registers, stack = int(found[1]), int(found[2])
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    return {
        "registers": registers,
        "stack": stack,
        "shared": shared,
        "wgmma": code.count("HGMMA"),
        "waits": code.count("WARPGROUP.DEPBAR"),
        "spills": code.count("STL") + code.count("LDL"),
        "programs": min(
            _REGISTER_FILE // (-(-registers * 32 // 256) * 256 * warps),
            _SHARED_MEMORY // (shared + 1024),
            64 // warps,
        ),
    }


def _tool(name: str, *arguments: str) -> str:
    path = _TOOLS / name
    if not path.exists():
        return ""
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=False).stdout


def attempt(run: Callable[[], Any]) -> str | None:
    """The last line of what went wrong, or None."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1:] or ''}"[:300]
    return None
