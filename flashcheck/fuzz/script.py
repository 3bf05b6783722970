"""Stand-alone repros: a short file that needs torch and the kernel, and runs by itself and under pytest.

The problem is written out, expected values are mpmath's, the assertion is the proved interval. Which check
failed decides what is asserted; every file is run once when it is written, and must fail.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashcheck.bounds.interval import Interval
from flashcheck.checks.judged import GRADIENTS, Judged
from flashcheck.fuzz.calls import Call, call_of
from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.groups import Failure
from flashcheck.kernel import Kernel
from flashcheck.oracle import exact
from flashcheck.problem import Problem

MOST_ELEMENTS = 64
"""Elements of the failing tensor that a file asserts, the worst ones first."""

MOST_PAIRS = 4096
"""Query-key pairs up to which expected values come from mpmath; above, from the judge's own oracle."""


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of one tensor: where, the exact value, what is accepted."""

    tensor: str
    indices: list[tuple[int, ...]]
    exact: list[float]
    lower: list[float]
    upper: list[float]
    source: str


def script_of(name: str, kernel: Kernel, case: FuzzCase, failure: Failure, device: str, finding: str) -> str:
    """The text of the file; ``name`` is the kernel's, as typed."""
    judged = Judged(kernel, case.build(), device)
    problem = judged.gradient_problem if failure.check.startswith("backward") else judged.problem
    call = call_of(name, kernel, problem, device, gradients=failure.check.startswith("backward"))
    body = _body(judged, failure)
    stored = _stored(judged) if failure.check.startswith("backward") else ""
    return "\n".join(
        [
            f'"""{failure.check} fails on {name}: {failure.message}',
            "",
            *(f"likely: {guess}" for guess in failure.guesses),
            f"Run it from the folder in which {name} can be imported: python FILE, or pytest FILE.",
            *call.notes,
            "Judge it again, with all checks: flashcheck replay FILE",
            '"""',
            "",
            *_imports(call, body),
            "",
            "nan, inf = float('nan'), float('inf')",
            f"DEVICE = {device!r}",
            "",
            tensors_text(problem) + stored,
            "",
            call.text,
            "",
            "",
            f"def test_{re.sub(r'[^a-z0-9]+', '_', failure.check.lower())}_{finding}() -> None:",
            *(f"    {line}" if line else "" for line in body.splitlines()),
            "",
            "",
            'if __name__ == "__main__":',
            f"    test_{re.sub(r'[^a-z0-9]+', '_', failure.check.lower())}_{finding}()",
            '    print("passes: the fault is gone")',
            "",
        ]
    )


def _imports(call: Call, body: str) -> list[str]:
    del body
    return [
        "import os",
        "import sys",
        "",
        *call.environment,
        "sys.path.insert(0, os.getcwd())",
        "import torch",
        *call.imports,
    ]


def literal(x: Tensor) -> str:
    """An expression for the tensor; every value is written so that it reads back exactly."""
    dtype = str(x.dtype)
    flat = x.detach().cpu().flatten()
    if not x.dtype.is_floating_point:
        return f"torch.tensor({flat.tolist()}, dtype={dtype}).reshape({tuple(x.shape)})"
    values = [_number(v) for v in flat.double().tolist()]
    if len(set(values)) == 1:
        return f"torch.full({tuple(x.shape)}, {values[0]}, dtype=torch.float64).to({dtype})"
    return f"torch.tensor([{', '.join(values)}], dtype=torch.float64).to({dtype}).reshape({tuple(x.shape)})"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return (
        str(int(value)) + "."
        if value == int(value) and abs(value) < 1e6 and str(value)[0] != "-"
        else repr(value)
    )


def tensors_text(problem: Problem) -> str:
    """``q = ...`` and so on for every tensor of the problem, on DEVICE."""
    lines = []
    for name in ("q", "k", "v", "dout", "dlse", "mask", "bias", "alibi_slopes", "sink", "key_lengths",
                 "cu_seqlens_q", "cu_seqlens_k"):  # fmt: skip
        x = getattr(problem, name)
        if x is not None:
            lines.append(f"{name} = {literal(x)}.to(DEVICE)")
    return "\n".join(lines)


def _stored(judged: Judged) -> str:
    out, lse = judged.stored
    return f"\nstored_out = {literal(out)}.to(DEVICE)\nstored_lse = {literal(lse)}.to(DEVICE)"


def _body(judged: Judged, failure: Failure) -> str:
    if failure.check == "crash":
        return "attend()  # ends the process"
    if not judged.answers() or failure.message.startswith("the kernel raised"):
        p, wanted = judged.problem, judged.rules.arithmetic.output_format.dtype
        shape = (p.batch, p.num_heads, p.num_queries, p.value_dim)
        return (
            "out, lse = attend()\n"
            f"assert tuple(out.shape) == {shape}, out.shape\n"
            f"assert out.dtype == {wanted}, out.dtype"
        )
    if failure.check == "bitwise.repeat":
        # Integers of the same size: a view as bytes needs a last stride of 1, which no result owes.
        kind = f"torch.int{8 * judged.rules.arithmetic.output_format.dtype.itemsize}"
        return (
            "first = attend()[0].cpu()\n"
            "for _ in range(50):\n"
            "    again = attend()[0].cpu()\n"
            f"    assert torch.equal(first.view({kind}), again.view({kind})), 'not the same bits'"
        )
    if failure.check == "special.nonfinite" and (text := _planted(judged, failure)):
        return text
    elements = _elements(judged, failure)
    if elements is None:
        return _through_the_check(failure)
    return _elementwise(elements)


def _through_the_check(failure: Failure) -> str:
    """For a check that has no short form."""
    return (
        "from pathlib import Path\n"
        "from flashcheck.checks import CHECKS\n"
        "from flashcheck.fuzz.store import read_finding\n"
        "from flashcheck.loading import load\n"
        "path = Path(__file__)\n"
        "finding = read_finding(path.with_name(path.stem.removeprefix('test_') + '.json'))\n"
        f"record = CHECKS[{failure.check!r}](load(finding.kernel), finding.case.build(), DEVICE)\n"
        "assert not record.failed, record.message"
    )


def _elementwise(e: Elements) -> str:
    got = {"O": "attend()[0]", "LSE": "attend()[1]"}.get(e.tensor, f"gradients()[{e.tensor.lower()!r}]")
    lines = [
        f"got = {got}.detach().cpu().double()",
        f"# index, exact value ({e.source}), smallest and largest value accepted",
        "accepted = [",
    ]
    lines += [
        f"    ({index}, {_number(x)}, {_number(low)}, {_number(high)}),"
        for index, x, low, high in zip(e.indices, e.exact, e.lower, e.upper, strict=True)
    ]
    lines += [
        "]",
        "for index, exact, lowest, highest in accepted:",
        "    value = float(got[index])",
        f"    assert lowest <= value <= highest, f'{e.tensor}{{index}}: got {{value!r}}, exact {{exact!r}}, '"
        " f'accepted {lowest!r} to {highest!r}'",
    ]
    return "\n".join(lines)


def _elements(judged: Judged, failure: Failure) -> Elements | None:
    """The elements over their bound, worst first; None for a check that asserts something else."""
    found = _interval(judged, failure)
    if found is None:
        return None
    tensor, got, interval, live = found
    margin = torch.where(live, interval.margin(got), 0.0)
    order = margin.flatten().argsort(descending=True, stable=True)[:MOST_ELEMENTS]
    order = order[margin.flatten()[order] > 1]
    if not len(order):
        return None
    values, source = _exact_values(judged, tensor, interval)
    indices = [tuple(int(i) for i in np.unravel_index(int(flat), margin.shape)) for flat in order]

    def pick(x: Tensor) -> list[float]:
        return [float(x[index]) for index in indices]

    return Elements(tensor, indices, pick(values), pick(interval.lower), pick(interval.upper), source)


def _interval(judged: Judged, failure: Failure) -> tuple[str, Tensor, Interval, Tensor] | None:
    live = ~judged.empty_rows
    algorithm = failure.check.endswith(".algorithm")
    if failure.check in ("forward.bound", "forward.algorithm"):
        if failure.tensor == "LSE" and judged.result.lse is not None:
            return "LSE", judged.result.lse, judged.bound.lse.interval, live
        bound = judged.bound.out
        interval = bound.centred if algorithm else bound.interval
        if interval is None:
            return None
        return "O", judged.result.out, interval, live.unsqueeze(-1).expand_as(judged.result.out)
    if failure.check in ("backward.bound", "backward.algorithm"):
        name = next((n for n, shown in GRADIENTS.items() if shown == failure.tensor), None)
        if name is None:
            return None
        tensor_bound = judged.backward_bound.tensors[name]
        interval = tensor_bound.centred if algorithm else tensor_bound.interval
        if interval is None:
            return None
        got = judged.gradients[name]
        return name, got, interval, torch.ones(got.shape, dtype=torch.bool)
    if failure.check == "special.empty_rows":
        empty = judged.empty_rows
        out, lse = judged.result.out, judged.result.lse
        if bool((out.double()[empty] != 0).any()) or lse is None:
            zero = torch.zeros(out.shape, dtype=torch.float64)
            nothing = torch.zeros(out.shape, dtype=torch.bool)
            fmt = judged.bound.out.interval.fmt
            return (
                "O",
                out,
                Interval(zero, zero, zero, zero, nothing, fmt),
                empty.unsqueeze(-1).expand_as(out),
            )
        return "LSE", lse, judged.bound.lse.interval, empty
    return None


def _exact_values(judged: Judged, tensor: str, interval: Interval) -> tuple[Tensor, str]:
    p = judged.problem
    if p.batch * p.num_heads * p.num_queries * p.num_keys > MOST_PAIRS or tensor not in ("O", "LSE"):
        return interval.exact, "the judge's oracle, rounded to float64"
    reference = exact.forward_all(p)
    return (reference.out if tensor == "O" else reference.lse), "mpmath, rounded to float64"


def _planted(judged: Judged, failure: Failure) -> str:
    """NaN or inf planted where the check planted it: rows that see it show it, the others do not change."""
    match = re.match(r"(nan|inf) in ([qkv])\[(\d+),(\d+),(\d+)\]", failure.message)
    if match is None:
        return ""
    value, tensor, (b, h, i) = match[1], match[2], (int(x) for x in match.groups()[2:])
    p, visible = judged.problem, judged.exact.visible
    affected = torch.zeros(visible.shape[:3], dtype=torch.bool)
    if tensor == "q":
        affected[b, h, i] = True
    else:
        heads = slice(h * p.group, (h + 1) * p.group)
        affected[b, heads] = visible[b, heads, :, i]
    column = (p.value_dim if tensor == "v" else p.head_dim) // 2
    reached = f"torch.isfinite(after{f'[..., {column}]' if tensor == 'v' else ''})"
    reached = f"(~{reached})" if tensor == "v" else f"(~{reached}).all(-1)"
    return "\n".join(
        [
            f"sees_it = {literal(affected)}",
            "before = attend()[0].detach().cpu()",
            f"{tensor}[{b}, {h}, {i}, {column}] = {value}",
            "after = attend()[0].detach().cpu()",
            f"assert bool({reached}[sees_it].all()), 'a row that sees it swallows it'",
            "same = (before == after) | (before.isnan() & after.isnan())",
            "assert bool(same[~sees_it].all()), 'a row that does not see it changes'",
        ]
    )
