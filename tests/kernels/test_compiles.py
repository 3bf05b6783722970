"""Every kernel compiles for Hopper, with every option, even where there is no GPU to run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles what it runs")
def test_every_kernel_compiles_for_hopper(tmp_path):
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, str(Path(__file__).with_name("compile_without_gpu.py"))]
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == [
        "_columns_kernel",
        "_convert_kernel",
        "_dbias_kernel",
        "_decode_kernel",
        "_delta_kernel",
        "_dkdv_kernel",
        "_dq_kernel",
        "_forward_kernel",
        "_hopper_dkdv_kernel",
        "_hopper_dq_kernel",
        "_hopper_forward_kernel",
        "_hopper_pipelined_kernel",
        "_maximum_kernel",
        "_merge_kernel",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU launches them")
def test_a_launch_that_recurs_is_the_same(tmp_path):
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, "-m", "tests.kernels.launched_again"]
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout == "as before"
