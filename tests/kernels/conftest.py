"""Kernels run on a CUDA device where there is one, else in Triton's interpreter on the CPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it must be set before anything imports the kernels.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
