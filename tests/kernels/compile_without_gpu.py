"""Compiles every kernel for Hopper on a machine with no GPU; run as a program by test_compiles.py.

The interpreter accepts much that the compiler refuses: a name that changes its type in a loop, a constant
assigned twice. A stand-in driver names the target, and a launch compiles without running.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels import tuning
from kernels.backward_dbias import launch_dbias
from kernels.backward_delta import launch_delta
from kernels.backward_dkdv import launch_dkdv
from kernels.backward_dq import launch_dq
from kernels.forward_kernel import launch_forward
from kernels.options import parse_options


class NoDriver:
    """What compilation asks of a driver."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device=None):
        return 0


def compile_all(dtype, head_dim, value_dim, heads, kv_heads, nq, nk, **options):
    q = torch.empty(1, heads, nq, head_dim, dtype=dtype)
    k = torch.empty(1, kv_heads, nk, head_dim, dtype=dtype)
    v = torch.empty(1, kv_heads, nk, value_dim, dtype=dtype)
    out, row = torch.empty(1, heads, nq, value_dim, dtype=dtype), torch.empty(1, heads, nq)
    parsed = parse_options(q, k, **options)
    launch_forward(q, k, v, parsed)
    launch_delta(out, out, row)
    launch_dq(out, q, k, v, row, row, parsed)
    launch_dkdv(out, q, k, v, row, row, parsed)
    if parsed.bias is not None:
        launch_dbias(out, q, k, v, row, row, options["bias"], parsed)


def main():
    triton.runtime.driver.set_active(NoDriver())
    tuning.architecture = lambda _: "sm90"
    # Small tiles: what is tested is that the source compiles, not how well.
    small = tuning.Tile(16, 16, 1, 1)
    tuning._BACKWARD = {key: {256: small} for key in tuning._BACKWARD}
    tuning._FORWARD_WITH_DATA_MASK = {}
    tuning._FORWARD = {key: {256: small} for key in tuning._FORWARD}
    run, names = JITFunction.run, []

    def warm_up(self, *args, **kwargs):
        names.append(self.__name__)
        return run(self, *args, **{**kwargs, "warmup": True})

    JITFunction.run = warm_up
    ends = torch.tensor([0, 20, 40])
    everything = {
        "scale": -0.5,
        "causal": "bottom_right",
        "window": (9, None),
        "mask": torch.ones(1, 1, 40, 40, dtype=torch.bool),
        "alibi_slopes": torch.ones(4),
        "softcap": 3.0,
        "sink": torch.zeros(4),
        "key_lengths": torch.tensor([30]),
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends,
    }
    compile_all(torch.bfloat16, 16, 16, 4, 4, 40, 40)
    compile_all(torch.float32, 5, 20, 4, 2, 1, 1, window=(9, 9), scale=-1.0, key_lengths=torch.tensor([1]))
    compile_all(torch.bfloat16, 16, 16, 4, 2, 40, 40, bias=torch.zeros(1, 1, 1, 40), **everything)
    sys.stdout.write(" ".join(sorted(set(names))))


if __name__ == "__main__":
    main()
