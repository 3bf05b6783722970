"""Measures the rungs; prints three tables. Run as ``python -m tests.oracle.measure [problems]``.

1. seconds and certified decimal digits per rung, one head, N = d = 64 and 128, bf16 N(0, 1);
2. rows that climb, per value family, when half an ulp of an fp32 or bf16 output is allowed;
3. largest |difference| / claimed error between rungs over random problems (1,000 by default).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashcheck.formats import BF16, FP32, Format, half_ulp
from flashcheck.oracle import arb, double_double, exact, fp64, ladder, own_error, unit
from flashcheck.problem import Problem
from tests.oracle.compare import DIGITS, excess, halves
from tests.oracle.problems import random_problem

FORWARD = ("out", "lse", "scores", "probabilities")
BACKWARD = ("dq", "dk", "dv", "dbias", "dsink", "dscale")


def head(n: int, heads: int = 1, seed: int = 0) -> Problem:
    gen = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(1, heads, n, n, generator=gen).bfloat16() for _ in range(4))
    return Problem(q=q, k=k, v=v, dout=dout)


def seconds(f: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Best of ``repeats`` and the last result."""
    best, result = math.inf, None
    for _ in range(repeats):
        start = time.perf_counter()
        result = f()
        best = min(best, time.perf_counter() - start)
    return best, result


def digits(error: Tensor, value: Tensor) -> float:
    """Certified decimal digits of the largest element."""
    return -math.log10(float(error.max()) / float(value.abs().max()))


def speed() -> None:
    print("rung            N=d  forward s  digits  backward s  digits of dq")
    for n in (64, 128):
        problem = head(n)
        bits = exact.working_bits(problem)
        rungs: tuple[tuple[str, Any, Any, unit.Unit, int], ...] = (
            ("fp64", fp64.forward, fp64.backward, unit.FP64, 5),
            ("double-double", double_double.forward, double_double.backward, unit.DOUBLE_DOUBLE, 3),
            ("mpmath", exact.forward_all, exact.backward, unit.multiprecision(bits), 1),
        )
        for name, forward, backward, used, repeats in rungs:
            t_forward, f = seconds(lambda: forward(problem), repeats)  # noqa: B023
            t_backward, g = seconds(lambda: backward(problem), repeats)  # noqa: B023
            f = f.rounded() if hasattr(f, "rounded") else f
            if name == "mpmath":
                g = g.rounded(problem)
            elif hasattr(g, "rounded"):
                g = g.rounded()
            d_forward = digits(own_error.forward_error(problem, f, used).out, f.out)
            d_backward = digits(own_error.backward_error(problem, f, g, used).dq, g.dq)
            print(
                f"{name:15} {n:3}  {t_forward:9.4f}  {d_forward:6.1f}  {t_backward:10.4f}  {d_backward:6.1f}"
            )
        t_forward, balls = seconds(lambda: arb.forward(problem, bits), 1)  # noqa: B023
        t_backward, grads = seconds(lambda: arb.backward(problem, bits=bits), 1)  # noqa: B023
        d_forward = digits(arb.radii(balls.out), arb.midpoints(balls.out))
        d_backward = digits(arb.radii(grads.dq), arb.midpoints(grads.dq))
        print(f"{'arb':15} {n:3}  {t_forward:9.4f}  {d_forward:6.1f}  {t_backward:10.4f}  {d_backward:6.1f}")


def families() -> dict[str, Problem]:
    """Value families from harmless to hopeless for float64; 64 rows each."""
    base = head(64, heads=4, seed=1)
    found = {"ordinary": base}
    for power in (2, 4, 6, 8, 10, 13, 16, 20, 30):
        found[f"logits of 1e{power}"] = base.replaced(q=(base.q.double() * 10.0**power).bfloat16())
    for power in (0, 6, 10, 13, 16):
        k = base.k.clone()
        k[:, :, 1::2] = k[:, :, ::2]  # every key twice, the copy moved by one bf16 ulp in one place
        k[:, :, 1::2, 0] *= 1 + 2.0**-7
        q = (base.q.double() * 10.0**power).bfloat16()
        found[f"near-ties at 1e{power}"] = base.replaced(q=q, k=k)
    v = base.v.clone()
    v[:, :, 1::2] = -v[:, :, ::2]
    found["values that cancel"] = base.replaced(v=v, k=base.k[:, :, :1].expand_as(base.k).contiguous())
    return found


def climbing() -> None:
    print("\nfamily               fp32 output: dd   exact   bf16 output: dd   exact")
    for name, problem in families().items():
        shares = [climbed(problem, fmt) for fmt in (FP32, BF16)]
        cells = "   ".join(f"{dd:15.1%} {top:7.1%}" for dd, top in shares)
        print(f"{name:20} {cells}")


def climbed(problem: Problem, fmt: Format) -> tuple[float, float]:
    """Shares of rows on the second and third rung when half an ulp of the output is allowed."""
    out = fp64.forward(problem).out
    allowed = ladder.AllowedForward(half_ulp(out, fmt), torch.full(out.shape[:3], torch.inf).double())
    rung = ladder.forward(problem, allowed).rung
    return float((rung == 1).double().mean()), float((rung == 2).double().mean())


def agreement(count: int) -> None:
    """Rungs against mpmath at 60 digits, logits from 1 to 1e25."""
    worst: dict[tuple[str, str], float] = {}
    proved: dict[tuple[str, str], list[int]] = {}

    def record(rung: str, name: str, got: Any, values: Any, claimed: Tensor) -> None:
        key = (rung, name)
        worst[key] = max(worst.get(key, 0.0), excess(got, halves(values), claimed))
        finite, total = proved.setdefault(key, [0, 0])
        proved[key] = [finite + int(torch.isfinite(claimed).sum()), total + claimed.numel()]

    done, seed = 0, 10_000
    while done < count:
        seed += 1
        problem = random_problem(seed, max_length=6, spread=(1.0, 2.0**12, 2.0**33, 2.0**83)[seed % 4])
        if 0 in (problem.num_queries, problem.num_keys) or not bool(torch.isfinite(problem.q.double()).all()):
            continue
        done += 1
        low, high = fp64.forward(problem), double_double.forward(problem)
        low_g, high_g = fp64.backward(problem), double_double.backward(problem)
        heads = [
            [exact.forward(problem, b, h, digits=DIGITS) for h in range(problem.num_heads)]
            for b in range(problem.batch)
        ]
        gradients = exact.backward(problem, digits=DIGITS)
        for rung, f, g, used in (
            ("fp64", low, low_g, unit.FP64),
            ("double-double", high, high_g, unit.DOUBLE_DOUBLE),
        ):
            rounded_f = f.rounded() if isinstance(f, double_double.TwofoldForward) else f
            rounded_g = g.rounded() if isinstance(g, double_double.TwofoldBackward) else g
            error = own_error.forward_error(problem, rounded_f, used)
            for name in FORWARD:
                values = [[getattr(head, name) for head in batch] for batch in heads]
                record(rung, name, getattr(f, name), values, getattr(error, name))
            grad_error = own_error.backward_error(problem, rounded_f, rounded_g, used)
            for name in BACKWARD:
                if getattr(g, name) is not None:
                    record(rung, name, getattr(g, name), getattr(gradients, name), getattr(grad_error, name))
    print(f"\n{count} random problems: largest |difference| / claim, and share of claims that are finite")
    for (rung, name), ratio in worst.items():
        finite, total = proved[rung, name]
        print(f"{rung:15} {name:14} {ratio:8.4f}  {finite / max(total, 1):7.1%}")


if __name__ == "__main__":
    speed()
    climbing()
    agreement(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
