"""How tight the bounds are: median of bound / rms error, family by family, beside the first prototype's.

    python -m tests.bounds.tightness [--seeds 3] [--json PATH]

For each value family and tensor: bound / |error| at every element that errs, its median over a problem,
and the median of that over honest emulators (bf16 on two machines, fp16 and e4m3) and seeds. A: worst
case; C: centred on the predicted roundings. The prototype's figures are its medians over its own models
at the same sizes; LSE and end-to-end gradients exist in tier A alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from flashcheck.arithmetic import ARITHMETICS, HOPPER, IEEE, Arithmetic, Machine
from flashcheck.bounds.backward import backward_bound
from flashcheck.bounds.forward import forward_bound
from flashcheck.bounds.interval import Interval
from flashcheck.bounds.pairs import Given
from flashcheck.emulator.backward import backward
from flashcheck.emulator.forward import forward
from flashcheck.emulator.tiles import concrete
from flashcheck.formats import half_ulp, round_nearest
from flashcheck.oracle import fp64
from flashcheck.problem import Problem

MODELS: dict[str, tuple[Arithmetic, Machine]] = {
    "flash.bf16 ieee": (ARITHMETICS["flash.bf16"], IEEE),
    "flash.bf16 hopper": (ARITHMETICS["flash.bf16"], HOPPER),
    "flash.fp16 hopper": (ARITHMETICS["flash.fp16"], HOPPER),
    "flash.e4m3 ieee": (ARITHMETICS["flash.e4m3"], IEEE),
}

# Medians over the prototype's models (N = 128, d = 64), in tier A but for "O C"; dQ and dK end to end last.
_MEASURED = ("O", "O C", "dV", "dQ", "dK", "LSE", "dQ end", "dK end")
PROTOTYPE: dict[str, dict[str, float]] = {
    family: dict(zip(_MEASURED, figures, strict=True))
    for family, figures in {
        "normal": (13.4, 1.0, 12.2, 10.2, 10.5, 89, 77, 81),
        "causal": (9.8, 1.0, 8.0, 7.4, 7.2, 119, 57, 55),
        "n=512": (25, 1.0, 12.1, 18.6, 10.2, 158, 140, 78),
        "outliers": (12.4, 1.0, 11.8, 9.1, 10.0, 87, 69, 77),
        "cancelling V": (30, 1.0, 17.8, 17.8, 14.1, 63, 215, 114),
        "offset V": (4.6, 1.0, 12.2, 22, 23, 89, 290, 205),
        "ties": (14.6, 1.0, 6.8, 7.5, 5.8, 71, 58, 54),
        "huge logits": (137, 1.0, 52, 362, 17, 44, 1e4, 2e3),
    }.items()
}


def tensors_of(family: str, seed: int) -> list[Tensor]:
    """q, k, v, dout in float64, the prototype's own families and sizes."""
    queries, keys, dim = 128, 512 if family == "n=512" else 128, 64
    g = torch.Generator().manual_seed(seed)

    def normal(rows: int) -> Tensor:
        return torch.randn(1, 1, rows, dim, generator=g, dtype=torch.float64)

    q, k, v, dout = normal(queries), normal(keys), normal(keys), normal(queries)
    if family == "outliers":
        q, k, v = (
            x + 10 * torch.randn(x.shape, generator=g) * (torch.rand(x.shape, generator=g) < 1e-3)
            for x in (q, k, v)
        )
    if family == "cancelling V":
        sign = 1.0 - 2.0 * (torch.arange(keys) % 2).view(1, 1, -1, 1)
        q, v = 0.1 * q, sign * (1 + 0.01 * v)
    if family == "offset V":
        v = 100 + v
    if family == "ties":
        q, k = 4 * q, k[:, :, : keys // 8].repeat_interleave(8, 2)
    if family == "huge logits":
        q, k = 30 * q, 30 * k
    return [q, k, v, dout]


def slack(interval: Interval, got: Tensor) -> float | None:
    """Median of bound / |error| over the elements that err visibly; None where none does."""
    exact, got = interval.exact, got.double()
    error = (got - exact).abs()
    bound = interval.bound
    counted = torch.isfinite(bound) & (error > 1e-6 * half_ulp(exact, interval.fmt))
    counted &= exact.abs() >= 1e-10 * exact.abs().max()
    return float((bound[counted] / error[counted]).median()) if bool(counted.any()) else None


def slacks(family: str, arithmetic: Arithmetic, machine: Machine, seed: int) -> dict[str, float | None]:
    """Tensor (with " C" or " end") -> slack of one honest run."""
    arithmetic = concrete(arithmetic)
    fmt = arithmetic.input_format
    q, k, v, dout = tensors_of(family, seed)
    q, k, v = (round_nearest(x, fmt).to(fmt.dtype) for x in (q, k, v))
    dout = round_nearest(dout, arithmetic.output_format).to(arithmetic.output_format.dtype)
    problem = Problem(q, k, v, dout=dout, causal="top_left" if family == "causal" else None)
    exact = fp64.forward(problem)
    result = forward(problem, arithmetic, machine)
    assert result.lse is not None
    bound = forward_bound(problem, exact, arithmetic, machine)
    out: dict[str, float | None] = {
        "O": slack(bound.out.interval, result.out),
        "LSE": slack(bound.lse.interval, result.lse),
    }
    if bound.out.centred is not None:
        out["O C"] = slack(bound.out.centred, result.out)
    got = backward(problem, result.out, result.lse, arithmetic, machine)
    given = Given(result.out, result.lse)
    conditional = fp64.backward(problem, result.out, result.lse)
    free = Given(exact.out, exact.lse, bound.lse.interval.bound, bound.out.interval.bound)
    bounds = backward_bound(problem, exact, conditional, given, arithmetic, machine).tensors
    free_bounds = backward_bound(problem, exact, fp64.backward(problem), free, arithmetic, machine).tensors
    for name, label in (("dq", "dQ"), ("dk", "dK"), ("dv", "dV")):
        out[label] = slack(bounds[name].interval, got[name])
        out[f"{label} end"] = slack(free_bounds[name].interval, got[name])
        if (centred := bounds[name].centred) is not None:
            out[f"{label} C"] = slack(centred, got[name])
    return out


def medians(seeds: int) -> dict[str, dict[str, float]]:
    """family -> tensor -> median over models and seeds."""
    table: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for family in PROTOTYPE:
        for arithmetic, machine in MODELS.values():
            for seed in range(seeds):
                for tensor, value in slacks(family, arithmetic, machine, 1000 + seed).items():
                    if value is not None:
                        table[family][tensor].append(value)
    return {f: {t: statistics.median(v) for t, v in row.items()} for f, row in table.items()}


COLUMNS = ("O", "O C", "LSE", "dV", "dV C", "dQ", "dQ C", "dK", "dK C", "dQ end", "dK end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = medians(options.seeds)
    print("median bound / |error|: this (the prototype's); C: centred, end: end to end")
    print(f"{'family':13s}" + "".join(f"{c:>15s}" for c in COLUMNS))
    for family, row in table.items():
        cells = []
        for column in COLUMNS:
            before = PROTOTYPE[family].get(column)
            here = f"{row[column]:.3g}" if column in row else "-"
            cells.append(here + (f" ({before:g})" if before is not None else ""))
        print(f"{family:13s}" + "".join(f"{cell:>15s}" for cell in cells))
    if options.json is not None:
        data = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": platform.processor(),
            "torch": torch.__version__,
            "models": list(MODELS),
            "seeds": options.seeds,
            "median_slack": table,
            "prototype": PROTOTYPE,
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
