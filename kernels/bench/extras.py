"""Beside the grid: what people claim of flash attention, and the paths of our own that should cost little.

Every function returns plain data. Ratios are of TFLOP/s to our own dense bf16 attention at head dim 128.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels.bench.grid import brief
from kernels.bench.means import geometric_mean
from kernels.bench.methods import CUDNN, EAGER, OURS, attention
from kernels.bench.problems import TOKENS, WIDTH, Size, size
from kernels.bench.timing import Run, alternating, host_microseconds
from kernels.interface import flash_attention
from kernels.options import parse_options
from kernels.quantise import columns, prepare
from kernels.score_path import path_of

_DIM = 128
_FP8, _FP8_TURNED = "e4m3", "e4m3, v's keys contiguous"


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the problems are: those of a GPU, or tiny ones that show that everything runs."""

    device: str
    budget: float  # milliseconds a timing
    tokens: int = TOKENS
    width: int = WIDTH
    length: int = 4096
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    eager_lengths: tuple[int, ...] = (128, 512, 2048, 8192)


TINY = Scale("cpu", 1.0, 64, 128, 32, (16, 32), (16, 32))


def _passes(run: Callable[..., Any], leaves: list[Tensor]) -> tuple[Run, Run]:
    """The forward of a differentiable call, and its backward."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = run(*leaves)
    dout = torch.randn_like(out)
    return lambda: run(*leaves), lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _speeds(size: Size, run: Callable[..., Any], scale: Scale, leaves: list[Tensor]) -> dict[str, float]:
    forward, backward = _passes(run, leaves)
    times = alternating({"forward": forward, "backward": backward}, scale.budget)
    return {kind: size.operations(kind == "backward") / ms / 1e9 for kind, ms in times.items()}


def _against(speeds: dict[str, float], base: dict[str, float]) -> dict[str, float]:
    ratios = {f"{kind} ratio": speed / base[kind] for kind, speed in speeds.items()}
    return {**{f"{kind} tflops": x for kind, x in speeds.items()}, **ratios}


def _dense(scale: Scale, causal: bool = False) -> tuple[Size, dict[str, float]]:
    base = size(_DIM, scale.length, causal, scale.tokens, scale.width)
    run = attention(OURS, causal, scale.length, scale.device)
    return base, _speeds(base, run, scale, base.tensors(scale.device))


def head_dims(scale: Scale) -> dict[str, Any]:
    """Speed at head dims that are no power of two, the true dim counted."""
    found: dict[str, Any] = {}
    _, base = _dense(scale)
    for dim in (96, 192):
        problem = size(dim, scale.length, False, scale.tokens, scale.width)
        run = attention(OURS, False, scale.length, scale.device)
        found[str(dim)] = _against(_speeds(problem, run, scale, problem.tensors(scale.device)), base)
    return found


def grouped(scale: Scale) -> dict[str, Any]:
    """Eight query heads a head of keys and values, where there are so many."""
    problem, base = _dense(scale)
    q, k, v = problem.tensors(scale.device)
    kv_heads = max(1, problem.heads // 8)
    run = attention(OURS, False, scale.length, scale.device)
    return {"8:1": _against(_speeds(problem, run, scale, [q, k[:, :kv_heads], v[:, :kv_heads]]), base)}


def packed(scale: Scale) -> dict[str, Any]:
    """Sequences packed into a batch of 1, causal: all of one length, and lengths in powers of two."""
    problem, base = _dense(scale, causal=True)
    total = problem.batch * problem.length
    ragged = [total // 2**i for i in range(1, 8) if total // 2**i > 0]
    ragged.append(total - sum(ragged))
    found = {}
    for name, lengths in (("uniform", [problem.length] * problem.batch), ("ragged", ragged)):
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=scale.device)
        one = Size(1, problem.heads, total, problem.head_dim, True)

        def run(q: Tensor, k: Tensor, v: Tensor, ends: Tensor = ends) -> Any:
            return flash_attention(q, k, v, causal="top_left", cu_seqlens_q=ends, cu_seqlens_k=ends)

        speeds = _speeds(one, run, scale, one.tensors(scale.device))
        share = sum(n * n for n in lengths) / total**2
        speeds = {kind: x * share for kind, x in speeds.items()}
        found[name] = {"lengths": lengths, **_against(speeds, base)}
    return found


def memory(scale: Scale) -> dict[str, Any]:
    """Peak bytes a token beyond inputs, outputs and gradients, forward and backward of one sequence.

    Linear in the length means that the number does not change with it. Eager attention beside ours, where its
    scores stay below a few GiB.
    """
    heads = max(1, scale.width // _DIM)
    found: dict[str, Any] = {"heads": heads, "head_dim": _DIM, "bytes per token": {}}
    if not torch.cuda.is_available():
        return {**found, "bytes per token": "needs a GPU"}
    for name, lengths in ((OURS, scale.lengths), (EAGER, [n for n in scale.lengths if n <= 4096])):
        entry = found["bytes per token"].setdefault(name, {})
        for length in lengths:
            problem = Size(1, heads, length, _DIM, False)
            q, k, v, dout = problem.tensors(scale.device, 4)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            run = attention(name, False, length, scale.device)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = run(*leaves)
            gradients = torch.autograd.grad(out, leaves, dout)
            returned = sum(x.numel() * x.element_size() for x in (out, *gradients))
            peak = torch.cuda.max_memory_allocated() - before
            entry[str(length)] = (peak - returned) / length
            del out, gradients
    return found


def eager(scale: Scale) -> dict[str, Any]:
    """Forward and backward together: how many times faster than eager attention, by length."""
    found: dict[str, Any] = {}
    for length in scale.eager_lengths:
        problem = size(_DIM, length, False, scale.tokens, scale.width)
        tensors = problem.tensors(scale.device)
        runs: dict[str, Run] = {}
        for name in (OURS, EAGER):
            forward, backward = _passes(attention(name, False, length, scale.device), tensors)
            runs |= {f"{name} forward": forward, f"{name} backward": backward}
        times = alternating(runs, scale.budget)
        ours, theirs = (times[f"{n} forward"] + times[f"{n} backward"] for n in (OURS, EAGER))
        found[str(length)] = {"ours": ours, "eager": theirs, "speed-up": theirs / ours}
    return found


def host(scale: Scale) -> dict[str, Any]:
    """Microseconds of a whole forward call whose work is next to nothing: what Python and launching cost."""
    problem = Size(1, 2, scale.lengths[0] // 8, _DIM, False)
    q, k, v = problem.tensors(scale.device)
    found: dict[str, Any] = {}
    count = 200 if scale.device == "cuda" else 1
    for name in (OURS, CUDNN):
        run = attention(name, False, problem.length, scale.device)
        try:
            found[name] = host_microseconds(partial(run, q, k, v), count)
        except RuntimeError as error:
            found[name] = brief(error)
    return found


def fp8(scale: Scale) -> dict[str, Any]:
    """Forward in fp8 against bf16, side by side: long problems, causal or not, and the mean of their ratios.

    Whole calls, and calls whose v has contiguous keys already; once, what goes into preparing the operands.
    """
    if "score" not in inspect.signature(flash_attention).parameters:
        return {"e4m3": "not supported yet"}
    found: dict[str, Any] = {}
    ratios: dict[str, list[float]] = {_FP8: [], _FP8_TURNED: []}
    for length in (scale.length, scale.lengths[-1]):
        for causal in (False, True):
            problem = size(_DIM, length, causal, scale.tokens, scale.width)
            wide = problem.tensors(scale.device)
            q, k, v = (x.to(torch.float8_e4m3fn) for x in wide)
            run = partial(flash_attention, causal="top_left" if causal else None)
            first = not found
            times = alternating(_fp8_runs(run, wide, (q, k, v), first), scale.budget)
            entry = found.setdefault(problem.label, {"milliseconds": times})
            for name, collected in ratios.items():
                entry[f"{name} tflops"] = problem.operations(False) / times[name] / 1e9
                entry[f"{name} ratio"] = times["bf16"] / times[name]
                collected.append(entry[f"{name} ratio"])
    for name, collected in ratios.items():
        found[name] = {"forward ratio": geometric_mean(collected)}
    return found


def _fp8_runs(
    run: Callable[..., Any], wide: list[Tensor], narrow: tuple[Tensor, ...], all_: bool
) -> dict[str, Run]:
    q, k, v = narrow
    turned = columns(v)
    runs: dict[str, Run] = {
        "bf16": lambda: run(*wide),
        _FP8: lambda: run(q, k, v),
        _FP8_TURNED: lambda: run(q, k, turned),
    }
    if not all_:
        return runs
    plain, path = parse_options(wide[0], wide[1]), path_of(torch.bfloat16, "e4m3")
    return {
        **runs,
        "turning v": lambda: columns(v),
        "bf16, score='e4m3'": lambda: run(*wide, score="e4m3"),
        "converting bf16": lambda: prepare(wide[0], wide[1], wide[2], plain, path),
    }


# Those with goals first: a run may be out of time.
EXTRAS: dict[str, Callable[[Scale], dict[str, Any]]] = {
    "fp8": fp8,
    "packed": packed,
    "head dims": head_dims,
    "memory": memory,
    "eager": eager,
    "grouped": grouped,
    "host": host,
}
COMPILING = ("fp8", "packed", "head dims", "grouped")
"""Those whose kernels the grid does not compile."""
