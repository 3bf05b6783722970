"""A variance that float64 cannot hold predicts nothing: neither an error of 0 nor one of any size."""

import torch

from flashcheck.bounds.backward import _prediction
from flashcheck.bounds.rms import after_rounding
from flashcheck.formats import BF16


def test_an_infinite_variance_is_no_prediction() -> None:
    exact = torch.tensor([1.0, 1.0, 0.0, 2.0], dtype=torch.float64)
    variance = torch.tensor([1e-4, torch.inf, torch.inf, 1e10], dtype=torch.float64)
    rms = after_rounding(exact, variance, BF16)
    assert torch.isfinite(rms).tolist() == [True, False, False, True]
    predicted = _prediction(exact, rms, torch.ones(4, dtype=torch.bool))
    assert predicted.holds.tolist() == [True, False, False, True]
    assert bool(torch.isfinite(predicted.rms).all())
