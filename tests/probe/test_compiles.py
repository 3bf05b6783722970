"""Every kernel of the probe compiles for Hopper, even where there is no GPU to run it."""

from tests.offline import output_of, without_gpu


@without_gpu
def test_every_kernel_compiles_for_hopper(tmp_path):
    assert output_of("tests.probe.compile_without_gpu", tmp_path).split() == [
        "binary_kernel:3",
        "cast_kernel:4",
        "dot_kernel:13",
        "fused_kernel:2",
        "unary_kernel:7",
    ]
