"""Sinks beside huge scores; on a GPU this also meets the fusing of products into subtractions."""

import pytest

from tests.kernels.sinks import PATHS, SIZES, sink_faults


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "score"), PATHS)
def test_weights_beside_a_sink_are_exact(dtype, score, size, device):
    assert sink_faults((dtype, score, size), device) == []
