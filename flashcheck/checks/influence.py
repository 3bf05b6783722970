"""Influence: which keys and values reach which rows, read off the kernel, against the declaration."""

from __future__ import annotations

import torch
from torch import Tensor

from flashcheck.checks.accuracy import inaccurate
from flashcheck.checks.bits import differing
from flashcheck.checks.designed import chunks, key_height, level, normal, one_hot, value_height
from flashcheck.checks.judged import Judged
from flashcheck.checks.record import Record
from flashcheck.checks.registry import check, failed, not_applicable, passed
from flashcheck.kernel import ForwardResult
from flashcheck.oracle import fp64
from flashcheck.problem import Problem


@check("influence.forward", faults="CDEFILWA", reruns=2)
def influence_forward(judged: Judged) -> Record:
    """Every value reaches exactly the rows that see its key: the visible set is read off O, pair by pair.

    The options of the problem over level scores; values are one-hot by key, so O[i, c] is not 0 where,
    and only where, row i sees the key of column c. Rows also obey the bound, so that a key-side fault (a
    column of the head dim left out, a hidden key in the denominator) shows although V hides it.
    """
    name = "influence.forward"
    problem = judged.problem
    if not (problem.num_queries and problem.num_keys):
        return not_applicable(name, "no pair of a query and a key")
    base = level(problem)
    told = _told_rows(judged)
    runs = chunks(problem.num_keys, problem.value_dim)
    for keys in runs:
        values = one_hot(problem.v, keys, value_height(problem), int(keys[0]))
        read = Judged(judged.kernel, base.replaced(v=values), str(judged.device))
        seen = (read.result.out.double() != 0)[..., : len(keys)]
        fault = _pairs(seen, judged.exact.visible[..., keys], told.unsqueeze(-1), int(keys[0]), "O")
        over = next((m.worst for m in read.measured.values() if m.over and m.worst is not None), None)
        if fault:
            return failed(name, judged, fault[0], fault[1:])
        if over is not None and not inaccurate(judged):
            return failed(name, judged, f"keys that weigh the same do not come out so: {over.describe()}")
    return passed(name, judged, f"{int(judged.exact.visible.sum()):,} visible pairs in {len(runs)} runs")


def _told_rows(judged: Judged) -> Tensor:
    """Rows whose result is declared: all, or those that see a key."""
    everything = torch.ones_like(judged.empty_rows)
    return everything if judged.kernel.capabilities.empty_rows else ~judged.empty_rows


def _pairs(seen: Tensor, visible: Tensor, told: Tensor, first: int, tensor: str) -> tuple[str, ...]:
    """The fault that two visible sets (B, H, rows, keys) show, with evidence; empty where they agree."""
    wrong = (seen != visible) & told
    if not bool(wrong.any()):
        return ()
    b, h, i, j = wrong.nonzero()[0].tolist()
    extra, lost = int((wrong & seen).sum()), int((wrong & visible).sum())
    what = "sees" if bool(seen[b, h, i, j]) else "does not see"
    against = "hides" if bool(seen[b, h, i, j]) else "shows"
    rows = sorted({x[2] for x in wrong.nonzero().tolist()})
    return (
        f"by {tensor}, query {i} (batch {b}, head {h}) {what} key {first + j}, which the problem {against}",
        f"pairs seen that are hidden: {extra:,}; hidden that are visible: {lost:,}; in {len(rows)} rows",
        f"row {i}: {_marks(seen[b, h, i])}  read off the kernel, keys {first}..{first + seen.shape[-1] - 1}",
        f"{' ' * len(f'row {i}')}: {_marks(visible[b, h, i])}  declared",
    )


def _marks(row: Tensor, most: int = 64) -> str:
    text = "".join("x" if flag else "." for flag in row[:most].tolist())
    return text + ("…" if len(row) > most else "")


@check("influence.perturbed", faults="CDEIWA", reruns=4)
def influence_perturbed(judged: Judged) -> Record:
    """Changing single keys or queries changes the rows that see them, and no bit of any other row.

    One key of every key/value head, then all keys from a random one on, then a third of the queries.
    Where the exact result moves by more than both bounds the kernel's must move: proof that the change
    had an effect.
    """
    name = "influence.perturbed"
    problem = judged.problem
    if not judged.kernel.capabilities.deterministic:
        return not_applicable(name, "the kernel does not declare itself deterministic")
    if not (problem.num_queries and problem.num_keys):
        return not_applicable(name, "no pair of a query and a key")
    base = level(problem)
    own = base.replaced(v=normal(problem.v, problem.seed + 11))
    before = Judged(judged.kernel, own, str(judged.device))
    kept = ForwardResult(before.result.out.clone(), _clone(before.result.lse))
    _ = before.bound  # computed now: what it is computed from is changed in place below
    moved = 0
    generator = torch.Generator().manual_seed(problem.seed + 12)
    for text, tensor, where in _perturbations(problem, generator):
        # In place: other addresses may mean another alignment, and other last bits.
        changed = getattr(own, tensor)
        saved = changed.clone()
        wide = changed.double()
        wide[where] = 4 * wide[where] if tensor == "k" else _tilted(wide[where], generator)
        changed.copy_(wide.to(changed.dtype))
        after = Judged(judged.kernel, own.replaced(), str(judged.device))
        affected = where if tensor == "q" else _reached(judged, where)
        fault, count = _moved(before, kept, after, affected & _told_rows(judged), ~affected, text)
        changed.copy_(saved)
        moved += count
        if fault:
            return failed(name, judged, fault)
    return passed(name, judged, f"{moved} rows moved as they had to")


def _clone(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()


def _perturbations(problem: Problem, generator: torch.Generator) -> list[tuple[str, str, Tensor]]:
    """(words, tensor, boolean (B, heads, rows) of what changes)."""
    shape = (problem.batch, problem.num_kv_heads, problem.num_keys)
    single = torch.zeros(shape, dtype=torch.bool)
    picked = torch.randint(problem.num_keys, (*shape[:2], 1), generator=generator)
    single.scatter_(-1, picked, True)
    cut = int(torch.randint(problem.num_keys, (), generator=generator))
    suffix = (torch.arange(problem.num_keys) >= cut).expand(shape).clone()
    rows = torch.rand(problem.q.shape[:3], generator=generator) < 1 / 3
    return [
        ("one key of every head", "k", single),
        (f"all keys from {cut} on", "k", suffix),
        ("a third of the queries", "q", rows),
    ]


def _tilted(x: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the columns set to 0 or doubled, so that scores no longer agree."""
    kept = torch.rand(x.shape, generator=generator)
    return torch.where(kept < 0.5, 0.0, 2.0).to(x.dtype)


def _reached(judged: Judged, keys: Tensor) -> Tensor:
    """Boolean (B, H, Nq): rows that see one of the keys (B, Hkv, Nk)."""
    by_head = keys.repeat_interleave(judged.problem.group, 1).unsqueeze(-2)
    return (judged.exact.visible & by_head).any(-1)


def _moved(
    before: Judged, kept: ForwardResult, after: Judged, may: Tensor, may_not: Tensor, text: str
) -> tuple[str, int]:
    """The fault, or ""; and how many rows had to move and did."""
    got = after.result
    changed = differing(got.out, kept.out).any(-1)
    if got.lse is not None and kept.lse is not None:
        changed = changed | differing(got.lse, kept.lse)
    strayed = changed & may_not
    if bool(strayed.any()):
        place = strayed.nonzero()[0].tolist()
        return f"changing {text} changes row {place}, which sees none of it ({int(strayed.sum())} rows)", 0
    first, second = before.bound.out.interval, after.bound.out.interval
    must = ((first.exact - second.exact).abs() > first.bound + second.bound).any(-1)
    if got.lse is not None:
        one, two = before.bound.lse.interval, after.bound.lse.interval
        must = must | ((one.exact - two.exact).abs() > one.bound + two.bound)
    stuck = must & may & ~changed
    if bool(stuck.any()):
        place = stuck.nonzero()[0].tolist()
        return f"changing {text} does not change row {place}, which sees it ({int(stuck.sum())} rows)", 0
    return "", int((must & may).sum())


@check("influence.backward", faults="CDEFILA", reruns=8)
def influence_backward(judged: Judged) -> Record:
    """Gradients reach exactly the visible pairs: the visible set is read off dQ, dK and dV.

    dO one-hot by query shows the pairs in dV, keys one-hot by key in dQ, queries one-hot by query in dK;
    level scores otherwise. Query heads of one group add into the same dV, where their union is read; dK is
    read for one of them. Where dS is stored in 8 bits it may round to 0, and dV alone is read.
    """
    name = "influence.backward"
    problem = judged.problem
    if judged.kernel.backward is None:
        return not_applicable(name, "no backward is declared")
    if not (problem.num_queries and problem.num_keys):
        return not_applicable(name, "no pair of a query and a key")
    if not {"dq", "dk", "dv"} <= set(judged.kernel.capabilities.gradients):
        return not_applicable(name, "dq, dk and dv are not all declared")
    visible = judged.exact.visible
    union = torch.unflatten(visible, 1, (problem.num_kv_heads, problem.group)).any(2)
    told = _told_rows(judged).unsqueeze(-1)
    base = level(problem)
    values = base.replaced(v=normal(problem.v, problem.seed + 13))
    assert judged.gradient_problem.dout is not None
    # Large, so that no dS is rounded to 0 among the subnormal numbers of fp16.
    dout = 256 * normal(judged.gradient_problem.dout, problem.seed + 14)
    rules = judged.rules.arithmetic
    narrow = (rules.grad_score_format or rules.probability_format).quantum > 2.0**-30
    runs = 0
    for rows in chunks(problem.num_queries, problem.value_dim):
        marked = one_hot(dout, rows, 1.0, int(rows[0]))
        got = _gradients(judged, values.replaced(dout=marked))["dv"]
        fault = _by_column(got, union[:, :, rows], rows, "dV")
        runs += 1
        if fault:
            return failed(name, judged, fault[0], fault[1:])
    for keys in [] if narrow else chunks(problem.num_keys, problem.head_dim):
        marked = one_hot(problem.k, keys, key_height(problem), int(keys[0]))
        got = _gradients(judged, values.replaced(k=marked, dout=dout))["dq"]
        seen = (got.double() != 0)[..., : len(keys)]
        runs += 1
        expected = visible[..., keys] & _several(visible).unsqueeze(-1) & _scaled(problem)
        fault = _pairs(seen, expected, told & _certain(visible, keys), int(keys[0]), "dQ")
        if fault:
            return failed(name, judged, fault[0], fault[1:])
    # dS of two heads of a group can cancel in a narrow format: dK is read for one head of every group.
    member = problem.seed % problem.group
    alone = torch.zeros_like(dout)
    alone[:, member :: problem.group] = dout[:, member :: problem.group]
    its = visible[:, member :: problem.group]
    for rows in [] if narrow else chunks(problem.num_queries, problem.head_dim):
        marked = one_hot(problem.q, rows, 1.0, int(rows[0]))
        level_keys = torch.full_like(problem.k, key_height(problem))
        got = _gradients(judged, values.replaced(q=marked, k=level_keys, dout=alone))["dk"]
        runs += 1
        expected = (its & _several(its).unsqueeze(-1) & _scaled(problem))[:, :, rows]
        fault = _by_column(got, expected, rows, "dK", its[:, :, rows])
        if fault:
            return failed(name, judged, fault[0], fault[1:])
    return passed(name, judged, f"{int(visible.sum()):,} visible pairs in {runs} runs")


def _gradients(judged: Judged, problem: Problem) -> dict[str, Tensor]:
    # Which gradients are 0 is asked, not how large they are: float64's forward will do for the stored one.
    one = Judged(judged.kernel, problem, str(judged.device))
    return one.run_backward(*one.stored_from(fp64.forward(one.multiplied)))


def _scaled(problem: Problem) -> bool:
    """Scores, and so dQ and dK, depend on q and k at all."""
    return problem.effective_scale != 0


def _several(visible: Tensor) -> Tensor:
    """Rows whose dS is not 0 by cancellation: a row with one key alone has P = 1 and dS = 0."""
    return visible.sum(-1) > 1


def _certain(visible: Tensor, keys: Tensor) -> Tensor:
    """Pairs on which dQ must tell; of a row with a single key rounding may leave either."""
    return (visible.sum(-1, keepdim=True) > 1) | ~visible[..., keys]


def _by_column(
    got: Tensor, visible: Tensor, rows: Tensor, tensor: str, allowed: Tensor | None = None
) -> tuple[str, ...]:
    """A fault of (B, Hkv, Nk, columns), column c standing for query rows[c]; ``allowed`` may be non-zero."""
    seen = (got.double() != 0)[..., : len(rows)].mT
    certain = torch.ones_like(seen) if allowed is None else visible | ~allowed
    fault = _pairs(seen, visible, certain, 0, tensor)
    if not fault:
        return ()
    return (fault[0], f"rows count from query {int(rows[0])}", *fault[1:])
