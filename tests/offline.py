"""Programs that compile kernels as a GPU would have them, run where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles and launches what it runs")


def output_of(module: str, cache: Path) -> str:
    """What ``python -m module`` prints, outside the interpreter and with an empty cache of Triton's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    program = [sys.executable, "-m", module]
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout
