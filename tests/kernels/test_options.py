"""Every option, forward and backward together, against the definition in float64."""

import math

import pytest
import torch
from attention import assert_close, assert_gradients_close, gradients, inputs, make

import kernels

INF, NAN = math.inf, math.nan


def check(q, k, v, **options):
    """Output, log-sum-exp and every gradient; returns the gradients."""
    out, lse = kernels.forward(q, k, v, **options)
    assert_close(out, lse, q, k, v, **options)
    dout, dlse = make(out.shape, out.dtype, 100, q.device), make(lse.shape, torch.float32, 101, q.device)
    got = kernels.backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    assert_gradients_close(got, gradients(q, k, v, dout, dlse, **options), q.dtype)
    return got


WINDOWS = [(0, 0), (1, None), (None, 2), (15, 16), (70, 1), (3, 0), (2**31, 2**31)]


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_window(window, causal, device):
    check(*inputs(device, heads=1, nq=70, nk=90), window=window, causal=causal)


@pytest.mark.parametrize("lengths", [(150, 20), (20, 150), (130, 129)], ids=str)
def test_window_that_empties_whole_tiles_of_a_row(lengths, device):
    check(*inputs(device, heads=1, nq=lengths[0], nk=lengths[1]), window=(5, 0))
    check(*inputs(device, heads=1, nq=lengths[0], nk=lengths[1]), window=(3, 3), causal="top_left")
