"""Problems whose answers are exact in every format, and every launch configuration to run them on.

Queries and keys are rows of a Hadamard matrix times a factor that makes a match outweigh all else by more
than 2^150: a row's weights are 1/w for its w matching keys, a power of two, and 0 for all others. Values and
output gradients are -1, 0 or 1. O, dV and dP are then exact, P and dS are exact once rounded to 16 bits or
TF32, and so are the sums dQ and dK: any other bit is a fault of the kernel, the assembler or the machine.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from kernels import interpreter, tuning
from kernels.backward_delta import launch_delta
from kernels.backward_dkdv import launch_dkdv
from kernels.backward_dq import launch_dq
from kernels.bench.candidates import all_candidates
from kernels.decode_kernel import launch_decode
from kernels.forward_kernel import launch_forward
from kernels.hopper.backward_dkdv import launch_hopper_dk, launch_hopper_dkdv, launch_hopper_dv
from kernels.hopper.backward_dq import launch_hopper_dq
from kernels.hopper.forward import launch_hopper_forward, launch_hopper_products
from kernels.hopper.pipelined import launch_hopper_pipelined
from kernels.operands import Gradients
from kernels.options import parse_options
from kernels.quantise import columns, prepare
from kernels.score_path import parse_score_path
from kernels.tuning import Tile

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_NAMES = ("e4m3", "e5m2")
PIPELINED = tuple(f"hopper pipelined{turns}{way}" for turns in ("", " turns") for way in ("", " persistent"))


@dataclass(frozen=True)
class Exact:
    """A problem with its answers, float64 on the CPU."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    answers: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Configuration:
    """One kernel with one tile; ``score`` as the caller of the kernels gives it."""

    kernel: str
    dtype: torch.dtype
    head_dim: int
    tile: Tile
    score: str | None = None

    def __str__(self) -> str:
        t = self.tile
        shape = f"{t.block_m}x{t.block_n} warps {t.num_warps} stages {t.num_stages}"
        return f"{self.kernel} {self.dtype} score {self.score} d {self.head_dim} {shape}"


def exact_problem(dtype, head_dim, device, num_queries=150, num_keys=300, heads=2, kv_heads=1, seed=0):
    """(problem, its scale). Keys past a power of two match no query; the last head dims may be zero."""
    codes = 1 << (head_dim.bit_length() - 1)
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < codes:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = torch.nn.functional.pad(matrix, (0, head_dim - codes)) * max(1.0, 128.0 / codes)
    generator = torch.Generator().manual_seed(seed)
    matched = 1 << (num_keys.bit_length() - 1)
    used = min(codes, matched)
    pick_k = torch.cat([torch.arange(matched) % used])[torch.randperm(matched, generator=generator)]
    pick_q = torch.randint(0, used, (heads, num_queries), generator=generator)
    # A match scores 128 * 128 / codes or more; scale brings it to 128 for all dims, exactly.
    scale = 128.0 / float(matrix[0].square().sum())
    k = torch.zeros(kv_heads, num_keys, head_dim)
    k[:, :matched] = matrix[pick_k]
    q = matrix[pick_q]
    values = torch.randint(-1, 2, (kv_heads, num_keys, head_dim), generator=generator).float()
    sparse = torch.rand(heads, num_queries, head_dim, generator=generator) < 8 / head_dim
    dout = torch.randint(-1, 2, (heads, num_queries, head_dim), generator=generator).float() * sparse
    group = heads // kv_heads
    keys, vals = (x.repeat_interleave(group, 0).double() for x in (k, values))
    matches = ((scale * q.double() @ keys.mT) > 64).double()
    shares = matches / matches.sum(-1, keepdim=True)
    out = shares @ vals
    ds = shares * (dout.double() @ vals.mT - (dout.double() * out).sum(-1, keepdim=True))
    per_kv = (kv_heads, group)
    answers = {
        "out": out,
        "lse": 128.0 + matches.sum(-1).log(),
        "dq": scale * ds @ keys,
        "dk": (scale * ds.mT @ q.double()).unflatten(0, per_kv).sum(1),
        "dv": (shares.mT @ dout.double()).unflatten(0, per_kv).sum(1),
    }
    wide = torch.bfloat16 if dtype in FP8 else dtype
    tensors = [x[None].to(d).to(device) for x, d in ((q, dtype), (k, dtype), (values, dtype), (dout, wide))]
    return Exact(*tensors, {n: x[None] for n, x in answers.items()}), scale


@contextmanager
def poisoned():
    """Memory that torch hands out uninitialised holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def faults(configuration, device, options=None, **sizes):
    """What of the answers is not exact, as text; the outputs' memory is poisoned before."""
    interpreter.repair()
    c = configuration
    problem, scale = exact_problem(c.dtype, c.head_dim, device, **sizes)
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    path = parse_score_path(c.dtype, c.score, None, None, False, True, False)
    parsed = parse_options(q, k, scale=scale, **(options or {}))
    stored = problem.answers["out"].to(dout.dtype).to(device), problem.answers["lse"].float().to(device)
    with poisoned():
        operands = prepare(q, k, v, parsed, path)
        if c.kernel.startswith("hopper"):
            found = hopper_results(c, problem, operands, parsed, path, stored)
        elif c.kernel == "forward":
            found = dict(zip(("out", "lse"), launch_forward(operands, parsed, path, c.tile), strict=True))
        elif c.kernel == "decode":
            parts = launch_decode(q, k, v, None, parsed, path, 3, c.tile)
            found = dict(zip(("out", "lse"), parts, strict=True))
        else:
            given = (operands.q, operands.k, operands.v) if path.operand == "tf32" else (q, k, v)
            delta = launch_delta(dout, stored[0], None)
            gradients = Gradients(*given, dout, stored[1], delta)
            if c.kernel == "dq":
                found = {"dq": launch_dq(gradients, operands, parsed, path, c.tile)}
            else:
                pair = launch_dkdv(gradients, operands, parsed, path, c.tile)
                found = dict(zip(("dk", "dv"), pair, strict=True))
    wrong = []
    for name, x in found.items():
        exact = problem.answers[name]
        # The log-sum-exp has roundings of its own; so has an fp32 P, and the row sum under an fp32 output.
        loose = name == "lse" or path.operand == "fp32" or (path.operand == "tf32" and name == "out")
        error = (x.double().cpu() - exact.to(x.dtype).double()).abs()
        allowed = 1e-4 * exact.abs().max() if loose else 0.0
        if not bool((error <= allowed).all()):
            wrong.append(f"{name}: {int((~(error <= allowed)).sum())} of {error.numel()} elements")
    return wrong


BEFORE, AFTER = {"q": 7, "k": 9}, {"q": 20, "k": 70}  # rows of other segments around a packed problem


def surrounded(x, side):
    """x as the middle one of three packed segments, the others NaN."""
    x = torch.nn.functional.pad(x, (0, 0, BEFORE[side], AFTER[side]), value=torch.nan)
    return x.contiguous()


def hopper_results(c, problem, operands, parsed, path, stored):
    """What a kernel of kernels/hopper makes of a problem, packed between segments of NaN if it says so."""
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    lse, delta = stored[1], launch_delta(dout, stored[0], None)
    inner = {"q": slice(None), "k": slice(None)}
    if "packed" in c.kernel:
        inner = {side: slice(BEFORE[side], BEFORE[side] + x.shape[2]) for side, x in (("q", q), ("k", k))}
        ends = {
            side: torch.tensor([0, s.start, s.stop, s.stop + AFTER[side]], dtype=torch.int32, device=q.device)
            for side, s in inner.items()
        }
        q, dout, k, v = surrounded(q, "q"), surrounded(dout, "q"), surrounded(k, "k"), surrounded(v, "k")
        lse, delta = (surrounded(x[..., None], "q")[..., 0].contiguous() for x in (lse, delta))
        parsed = replace(parsed, cu_q=ends["q"], cu_k=ends["k"], segments=3)
    given = (dout, q, k, v, lse, delta, parsed, c.tile)
    if path.operand in FP8_NAMES:
        operands = replace(operands, v=columns(operands.v))
    if c.kernel.startswith("hopper pipelined"):
        # Fewer programs than tiles, so that each takes several in turn.
        how = {"persistent": "persistent" in c.kernel, "turns": "turns" in c.kernel, "programs": 1}
        given = replace(operands, q=q, k=k, v=v) if "packed" in c.kernel else operands
        pair = launch_hopper_pipelined(given, parsed, path, c.tile, **how)
        return {name: x[:, :, inner["q"]] for name, x in zip(("out", "lse"), pair, strict=True)}
    if c.kernel == "hopper fp8":
        return dict(zip(("out", "lse"), launch_hopper_products(operands, parsed, path, c.tile), strict=True))
    if c.kernel.endswith("dq"):
        return {"dq": launch_hopper_dq(*given)[:, :, inner["q"]]}
    if c.kernel.endswith(" dk"):
        return {"dk": launch_hopper_dk(*given)[:, :, inner["k"]]}
    if c.kernel.endswith(" dv"):
        return {"dv": launch_hopper_dv(*given)[:, :, inner["k"]]}
    if c.kernel.endswith("dkdv"):
        dk, dv = launch_hopper_dkdv(*given)
        return {"dk": dk[:, :, inner["k"]], "dv": dv[:, :, inner["k"]]}
    out, lse = launch_hopper_forward(q, k, v, parsed, c.tile)
    return {"out": out[:, :, inner["q"]], "lse": lse[:, :, inner["q"]]}


PATHS = (
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float32, None),
    (torch.float32, "tf32"),
    (torch.float8_e4m3fn, None),
    (torch.float8_e5m2, None),
    (torch.bfloat16, "e4m3"),
)


def configurations(arch="sm90"):
    """Every entry of the table for ``arch``, with the head dims and dtypes that it serves."""
    found = []
    for dtype, score in PATHS:
        path = parse_score_path(dtype, score, None, None, False, True, False)
        operand_bytes = 1 if path.operand in ("e4m3", "e5m2") else dtype.itemsize
        gradient_bytes = 2 if path.gradient in ("fp16", "bf16") else 4
        tables = [("forward", t.get((arch, operand_bytes), {})) for t in tuning.forward_tables()]
        for kernel in ("dq", "dkdv"):
            table = tuning.backward_tables(two_copies=score == "e4m3")
            tables.append((kernel, table.get((arch, gradient_bytes, kernel), {})))
        if path.operand in FP8_NAMES and arch == "sm90":
            tables.append(("hopper fp8", tuning.hopper_tables()["fp8"]))
            tables += [(order, tuning.hopper_tables()["pipelined fp8"]) for order in PIPELINED]
        elif score is None and dtype.itemsize == 2 and arch == "sm90":
            for kernel, packed in itertools.product(("forward", "dq", "dkdv", "dk", "dv"), ("", "packed ")):
                tables += [(f"hopper {packed}{kernel}", tuning.hopper_tables()[f"{packed}{kernel}"])]
            for table in ("pipelined", "pipelined packed"):
                tables += [
                    (order.replace("pipelined", table), tuning.hopper_tables()[table]) for order in PIPELINED
                ]
        for kernel, by_dim in tables:
            entries = by_dim if isinstance(by_dim, list) else by_dim.items()
            found += [Configuration(kernel, dtype, dim, tile, score) for dim, tile in entries]
        if score is None:
            sizes = itertools.product((32, 64, 128, 256), (1, 64))
            tiles = [(d, tuning.decode_tile("cuda", dtype.itemsize, d, d, rows, 1000)) for d, rows in sizes]
            found += [Configuration("decode", dtype, d, tile, score) for d, tile in tiles]
    return list(dict.fromkeys(found))


def sweep_configurations():
    """Every candidate of the tuning sweep, in bf16 or e4m3: any of them may enter the tables."""
    found = []
    for (name, dim), tiles in all_candidates().items():
        dtype = torch.float8_e4m3fn if "fp8" in name else torch.bfloat16
        kernel = {"packed": "hopper packed forward"}.get(
            name, f"hopper {name.replace('-', ' ').replace('pipelined fp8', 'pipelined')}"
        )
        found += [Configuration(kernel, dtype, dim, tile) for tile in tiles]
    return list(dict.fromkeys(found))


def distinct_blocks(found):
    """One configuration for each kernel and block size: warps and stages mean nothing in the interpreter.

    The kernel in Gluon does not run there.
    """
    seen = {}
    for c in found:
        if c.kernel.startswith("hopper pipelined"):
            continue
        bare = replace(c, tile=Tile(c.tile.block_m, c.tile.block_n, in_parts=c.tile.in_parts))
        seen.setdefault((c.kernel, bare.tile), bare)
    return list(seen.values())
