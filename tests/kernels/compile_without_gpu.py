"""Compiles every kernel for Hopper on a machine with no GPU; run as a program by test_compiles.py.

``--fingerprint FILE`` keeps hashes of the code of all launches, those of the tuned tiles too.
``--against FILE`` names those that differ from what was kept, and exits with 1 where any does.
Without them, too, it exits with 1 where several groups of warps of a kernel write to the same shared memory.

The interpreter accepts much that the compiler refuses: a name that changes its type in a loop, a constant
assigned twice. A stand-in driver names the target, and a launch compiles without running.
"""

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch
import triton

from kernels import tuning
from kernels.backward_dbias import launch_dbias
from kernels.backward_delta import launch_delta
from kernels.backward_dkdv import launch_dkdv
from kernels.backward_dq import launch_dq
from kernels.bench.offline import compile_only
from kernels.decode_kernel import launch_decode
from kernels.forward_kernel import launch_forward
from kernels.hopper.backward_dkdv import launch_hopper_dk, launch_hopper_dkdv, launch_hopper_dv
from kernels.hopper.backward_dq import launch_hopper_dq
from kernels.hopper.forward import launch_hopper_forward, launch_hopper_products
from kernels.hopper.pipelined import launch_hopper_pipelined
from kernels.operands import Gradients, Operands
from kernels.options import parse_options
from kernels.quantise import columns, prepare
from kernels.score_path import output_dtype, parse_score_path, plain_path
from tests.kernels.ptx_fingerprint import changed, fingerprints


def compile_all(dtype, head_dim, value_dim, heads, kv_heads, nq, nk, path=None, **options):
    q = torch.empty(1, heads, nq, head_dim, dtype=dtype)
    k = torch.empty(1, kv_heads, nk, head_dim, dtype=dtype)
    v = torch.empty(1, kv_heads, nk, value_dim, dtype=dtype)
    out = torch.empty(1, heads, nq, value_dim, dtype=output_dtype(dtype))
    row = torch.empty(1, heads, nq)
    defaults = {"score": None, "score_scales": None, "score_rows": None, "hadamard": False, "promote": True}
    path = parse_score_path(dtype, **{**defaults, "allow_tf32": False, **(path or {})})
    parsed = parse_options(q, k, **options)
    operands = prepare(q, k, v, parsed, path)
    given = (operands.q, operands.k, operands.v) if path.operand == "tf32" else (q, k, v)
    tensors = Gradients(*given, out, row, row)
    launch_forward(operands, parsed, path)
    launch_delta(out, out, row)
    launch_dq(tensors, operands, parsed, path)
    launch_dkdv(tensors, operands, parsed, path)
    if parsed.bias is not None:
        launch_dbias(tensors, operands, options["bias"], parsed, path)


def compile_hopper():
    """Every kernel of kernels/hopper, packed too, and fp8; small tiles again, as far as wgmma has them."""
    tile = tuning.Tile(64, 64, 4, 1)
    for dtype, options in (
        (torch.bfloat16, {}),
        (torch.float16, {"causal": "bottom_right", "window": (9, 3)}),
    ):
        q, k = torch.empty(1, 4, 100, 64, dtype=dtype), torch.empty(1, 2, 80, 64, dtype=dtype)
        row, ends = torch.empty(1, 4, 100), torch.tensor([0, 40, 80])
        for packing in ({}, {"cu_seqlens_q": ends, "cu_seqlens_k": ends}):
            parsed = parse_options(q[:, :, :80], k, **options, **packing)
            launch_hopper_forward(q, k, k, parsed, tile)
            launch_hopper_dq(q, q, k, k, row, row, parsed, tile)
            launch_hopper_dkdv(q, q, k, k, row, row, parsed, tile)
    parsed = parse_options(q, k, causal="top_left")
    large = tuning.Tile(128, 64, 8, 2)
    for groups in (2, 3, 4):
        more = tuning.Tile(64 * groups, 64, 4 * groups, 2)
        launch_hopper_pipelined(Operands(q, k, k), parsed, plain_path(torch.float16), more)
    split = [torch.empty(*x.shape[:3], 96, dtype=x.dtype) for x in (q, k, k)]
    launch_hopper_pipelined(Operands(*split), parsed, plain_path(torch.float16), large)
    in_parts = tuning.Tile(64, 64, 4, 2, in_parts=True)
    launch_hopper_dq(split[0], *split, row, row, parsed, in_parts)
    launch_hopper_dk(split[0], *split, row, row, parsed, in_parts)
    launch_hopper_dv(split[0], *split, row, row, parsed, in_parts)
    packed = parse_options(q[:, :, :80], k, causal="top_left", cu_seqlens_q=ends, cu_seqlens_k=ends)
    split[0] = split[0][:, :, :80].contiguous()
    launch_hopper_pipelined(Operands(*split), packed, plain_path(torch.float16), large, turns=True)
    path = parse_score_path(torch.float16, "e4m3", None, None, False, True, False)
    operands = prepare(q, k, k, parsed, path)
    operands = replace(operands, v=columns(operands.v))
    launch_hopper_products(operands, parsed, path, tile)
    launch_hopper_pipelined(operands, parsed, path, large)


def compile_tuned():
    """What the tables launch for calls with and without a band, packed too: the code whose speed counts."""
    ends = torch.tensor([0, 4096, 8192])
    packing = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    for d in (64, 96, 128, 192):
        q = torch.empty(1, 8, 8192, d, dtype=torch.bfloat16)
        row = torch.empty(1, 8, 8192)
        for options in ({}, {"causal": "bottom_right"}, {"causal": "top_left", **packing}):
            parsed = parse_options(q, q, **options)
            launch_hopper_forward(q, q, q, parsed)
            for dim, tile in tuning.hopper_tables()["pipelined"]:
                if dim == d and parsed.cu_q is None:
                    launch_hopper_pipelined(Operands(q, q, q), parsed, plain_path(q.dtype), tile)
            for entry in tuning._HOPPER_PIPELINED_PACKED.get(d, ()):
                if parsed.cu_q is not None:
                    path, turns = plain_path(q.dtype), entry.turns
                    launch_hopper_pipelined(Operands(q, q, q), parsed, path, entry.tile, turns=turns)
            launch_hopper_dq(q, q, q, q, row, row, parsed)
            launch_hopper_dkdv(q, q, q, q, row, row, parsed)
    compile_all(torch.bfloat16, 64, 64, 8, 2, 1000, 1000, softcap=3.0)
    compile_all(torch.bfloat16, 128, 128, 8, 2, 1000, 1000, causal="top_left")
    compile_all(torch.float8_e4m3fn, 128, 128, 8, 2, 1000, 1000, causal="top_left")


def compile_decode(dtype, block_table=None, **options):
    q, cache = torch.empty(2, 4, 3, 40, dtype=dtype), torch.empty(2, 2, 32, 40, dtype=dtype)
    launch_decode(q, cache, cache, block_table, parse_options(q, cache, **options), plain_path(dtype), 3)


def compile_options():
    """Every option at least once, in small tiles: to see that the source compiles, not how well."""
    small = tuning.Tile(16, 16, 1, 1)
    tuning._BACKWARD = {key: {256: small} for key in tuning._BACKWARD}
    tuning._BACKWARD_TWO_COPIES = {}
    tuning._FORWARD_WITH_DATA_MASK = {}
    tuning._FORWARD = {key: {256: tuning.Tile(16, 32, 1, 1)} for key in tuning._FORWARD}
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
    bias = torch.zeros(1, 1, 1, 40)
    compile_all(torch.bfloat16, 16, 16, 4, 4, 40, 40)
    compile_all(torch.float32, 5, 20, 4, 2, 1, 1, window=(9, 9), scale=-1.0, key_lengths=torch.tensor([1]))
    compile_all(torch.float32, 16, 16, 2, 2, 40, 40, {"score": "tf32"})
    compile_all(torch.float8_e5m2, 40, 20, 4, 2, 40, 40, causal="top_left")
    by_rows = {"score": "e4m3", "score_scales": "rows", "hadamard": True}
    compile_all(torch.bfloat16, 16, 16, 4, 2, 40, 40, by_rows, bias=bias, **everything)
    compile_hopper()
    compile_decode(torch.bfloat16)
    paged = {"causal": "bottom_right", "window": (9, None), "softcap": 3.0, "sink": torch.zeros(4)}
    compile_decode(torch.float8_e4m3fn, torch.zeros(2, 1, dtype=torch.int32), scale=-1.0, **paged)


def writers(ttgir):
    """How many roles of warps store to shared memory by themselves, where a kernel has roles.

    What the copy engine writes is not counted.
    """
    _, _, roles = ttgir.partition("ttg.warp_specialize(")
    return sum("ttg.local_store" in role for role in re.split(r"\n    partition\d+\(", roles))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fingerprint", type=Path, help="where the hashes go")
    parser.add_argument("--against", type=Path, help="hashes to compare with")
    arguments = parser.parse_args()
    triton.knobs.compilation.disable_line_info = True
    tuning.architecture = lambda _: "sm90"
    compiled = compile_only()
    if arguments.fingerprint or arguments.against:
        compile_tuned()
    compile_options()
    counts = {(k.name, writers(k.asm["ttgir"])) for k in compiled}
    found = [f"{name}: {n} groups of warps write to the same shared memory" for name, n in counts if n > 1]
    if arguments.fingerprint:
        arguments.fingerprint.write_text(json.dumps(fingerprints(compiled), indent=0) + "\n")
    if arguments.against:
        other = changed(compiled, arguments.against)
        found += other
        sys.stderr.write(f"{len(compiled)} launches, the code of {len(compiled) - len(other)} as before\n")
    sys.stderr.write("".join(f"{line}\n" for line in found))
    sys.stdout.write(" ".join(sorted({kernel.name for kernel in compiled})))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
