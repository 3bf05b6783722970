"""What kernels do at the edges of the contract, declared or not: a few problems of one head each.

``python -m tests.report.edges KERNEL...`` runs the kernels here and records what they did in
golden/field/edges.json, from which the comparison page takes it; with ``--json FILE`` in that file.
``--merge FILE...`` takes up what such files say.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flashcheck.checks.judged import on_device
from flashcheck.devices import choose_device, interpret_without_gpu
from flashcheck.files import write_atomically
from flashcheck.kernel import ForwardResult, Kernel
from flashcheck.loading import load
from flashcheck.oracle import fp64
from flashcheck.problem import Problem
from flashcheck.report.build import versions

RECORD = Path(__file__).parents[2] / "golden" / "field" / "edges.json"
LENGTH, DIM, ROW = 32, 32, 3


def _problem(**changes: object) -> Problem:
    """Normal bf16 values: one head of 32 queries and keys."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, LENGTH, DIM, generator=g).bfloat16() for _ in range(3))
    return Problem(q, k, v).replaced(**changes)


def _run(kernel: Kernel, problem: Problem) -> ForwardResult:
    device = torch.device(choose_device(None, kernel))
    result = kernel.forward(on_device(problem, device))
    return ForwardResult(result.out.cpu(), None if result.lse is None else result.lse.cpu())


def _value(x: Tensor) -> str:
    """0, NaN, inf, -inf or a number, where all elements are the same kind."""
    if bool(x.isnan().all()):
        return "NaN"
    if bool((x == x.flatten()[0]).all()):
        return f"{float(x.flatten()[0]):g}"
    return "NaN in part" if bool(x.isnan().any()) else "numbers"


def _against(got: Tensor, exact: Tensor) -> str:
    """right, NaN, or finite and wrong; to 2%, which tells apart what a rounding cannot confuse."""
    got = got.double()
    if bool(got.isnan().all()):
        return "NaN"
    wrong = got.isfinite() & ((got - exact).abs() > 0.02 * exact.abs().max())
    if bool(wrong.any()):
        return "finite and wrong"
    return "right" if bool(got.isfinite().all()) else "NaN in part"


def empty_rows(kernel: Kernel) -> str:
    """A row whose keys are all hidden: what O and LSE are."""
    if "mask" in kernel.capabilities.options:
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
        mask[..., 0, :] = False
        problem = _problem(mask=mask)
    elif "bottom_right" in kernel.capabilities.causal and kernel.capabilities.cross_lengths:
        base = _problem()
        problem = Problem(base.q, base.k[:, :, :16], base.v[:, :, :16], causal="bottom_right")
    else:
        return "cannot be asked"
    result = _run(kernel, problem)
    lse = "no LSE" if result.lse is None else f"LSE {_value(result.lse[..., 0])}"
    return f"O {_value(result.out[..., 0, :])}, {lse}"


def huge_logits(kernel: Kernel) -> str:
    """Scores up to +-1e4: one-hot rows."""
    base = _problem()
    problem = base.replaced(q=base.q * 40, k=base.k * 40)
    return _against(_run(kernel, problem).out, fp64.forward(problem).out)


def overflowing_scores(kernel: Kernel) -> str:
    """Scores past fp32's largest number, the first key ahead of all others."""
    base = _problem()
    q, k = torch.full_like(base.q, 1e25), torch.full_like(base.k, 1e20)
    k[:, :, 0] = 1e21
    problem = base.replaced(q=q, k=k)
    exact = base.v[:, :, :1].double().expand_as(base.v)
    return _against(_run(kernel, problem).out, exact)


def seen_nan(kernel: Kernel) -> str:
    """A NaN in one row of q: whether that row says so, and no other."""
    base = _problem()
    q = base.q.clone()
    q[0, 0, ROW, 0] = torch.nan
    before, after = _run(kernel, base).out, _run(kernel, base.replaced(q=q)).out
    others = torch.arange(LENGTH) != ROW
    kept = torch.equal(before[:, :, others], after[:, :, others])
    return f"its row {_value(after[0, 0, ROW])}, others {'unchanged' if kept else 'changed'}"


def nan_key(kernel: Kernel) -> str:
    """A NaN in the last key, which causality hides from all rows but the last."""
    if "causal" not in kernel.capabilities.options:
        return "cannot be asked"
    base = _problem(causal=kernel.capabilities.causal[0])
    k = base.k.clone()
    k[0, 0, -1, 0] = torch.nan
    before, after = _run(kernel, base).out[0, 0], _run(kernel, base.replaced(k=k)).out[0, 0]
    strayed = int((before[:-1] != after[:-1]).any(-1).sum())
    last = f"last row {_value(after[-1])}"
    return f"{last}, others unchanged" if not strayed else f"{last}, {strayed} of {LENGTH - 1} others changed"


def scale_zero(kernel: Kernel) -> str:
    """All scores 0, without and with causality."""
    if "scale" not in kernel.capabilities.options:
        return "cannot be asked"
    causal = kernel.capabilities.causal[0] if "causal" in kernel.capabilities.options else None
    said = []
    for problem in (_problem(scale=0.0), _problem(scale=0.0, causal=causal)):
        said.append(_against(_run(kernel, problem).out, fp64.forward(problem).out))
    return said[0] if said[0] == said[1] else f"{said[0]}; causal: {said[1]}"


def subnormals(kernel: Kernel) -> str:
    """bf16 values of 2^-128, whose mean is a bf16 number."""
    base = _problem()
    got = _run(kernel, base.replaced(v=torch.full_like(base.v, 2.0**-128))).out.double()
    if bool((got == 0).all()):
        return "flushed to 0"
    return "kept" if bool((got == 2.0**-128).all()) else "rounded"


EDGES: dict[str, Callable[[Kernel], str]] = {
    "empty row": empty_rows,
    "scores to 1e4": huge_logits,
    "scores past fp32": overflowing_scores,
    "NaN in q": seen_nan,
    "NaN in a hidden key": nan_key,
    "scale 0": scale_zero,
    "subnormal v": subnormals,
}


def observed(kernel: Kernel) -> dict[str, str]:
    """Edge -> what the kernel did, in a few words."""
    said = {}
    for name, edge in EDGES.items():
        try:
            said[name] = edge(kernel)
        except Exception as error:
            said[name] = f"raises {type(error).__name__}"
    return said


def _key(name: str, device: object) -> str:
    """Of a kernel on a device: one that runs on both kinds has an entry for each."""
    return name if str(device) == "cpu" or name.endswith(" on cuda") else f"{name} on cuda"


def main() -> None:
    """Records the named kernels; others keep what stands there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--json", type=Path, default=RECORD)
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="files that --json made")
    given = parser.parse_args()
    interpret_without_gpu()
    record = json.loads(given.json.read_text(encoding="utf-8")) if given.json.is_file() else {}
    for file in given.merge:
        for name, entry in json.loads(file.read_text(encoding="utf-8")).items():
            record[_key(name, entry["device"])] = entry
    for name in given.kernels:
        kernel = load(name)
        where = {"device": choose_device(None, kernel), "versions": versions()}
        record[_key(name, where["device"])] = {**where, "edges": observed(kernel)}
    write_atomically(given.json, json.dumps(dict(sorted(record.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
