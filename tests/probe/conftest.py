"""Probes run on a CUDA device where there is one, else in Triton's interpreter on the CPU."""

import os

import torch

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it must be set before anything imports the probe's kernels.
    os.environ["TRITON_INTERPRET"] = "1"
