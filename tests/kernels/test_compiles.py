"""Every kernel compiles for Hopper, with every option, even where there is no GPU to run it."""

from tests.offline import output_of, without_gpu


@without_gpu
def test_every_kernel_compiles_for_hopper(tmp_path):
    assert output_of("tests.kernels.compile_without_gpu", tmp_path).split() == [
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


@without_gpu
def test_a_launch_that_recurs_is_the_same(tmp_path):
    assert output_of("tests.kernels.launched_again", tmp_path) == "as before"
