"""The mask predicate against dense loops that were written without it."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashcheck.problem import Problem


def by_loops(problem: Problem) -> torch.Tensor:
    """The contract's words, pair by pair, in plain Python."""
    b, h, nq, nk = problem.batch, problem.num_heads, problem.num_queries, problem.num_keys
    seen = torch.zeros(b, h, nq, nk, dtype=torch.bool)
    for bb, hh, i, j in itertools.product(range(b), range(h), range(nq), range(nk)):
        seen[bb, hh, i, j] = _sees(problem, bb, hh, i, j)
    return seen


def _sees(p: Problem, b: int, h: int, i: int, j: int) -> bool:
    if p.cu_seqlens_q is not None and p.cu_seqlens_k is not None:
        ends_q, ends_k = p.cu_seqlens_q.tolist(), p.cu_seqlens_k.tolist()
        for start_q, end_q, start_k, end_k in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
            if start_q <= i < end_q:
                if not start_k <= j < end_k:
                    return False
                own_i, own_j, own_nq, own_nk = i - start_q, j - start_k, end_q - start_q, end_k - start_k
                break
    else:
        own_i, own_j, own_nq, own_nk = i, j, p.num_queries, p.num_keys
    end = own_nk - own_nq
    if p.causal == "top_left" and own_j > own_i:
        return False
    if p.causal == "bottom_right" and own_j > own_i + end:
        return False
    if p.window is not None:
        middle = own_i if p.causal == "top_left" else own_i + end
        left, right = p.window
        if left is not None and own_j < middle - left:
            return False
        if right is not None and own_j > middle + right:
            return False
    if p.key_lengths is not None and j >= int(p.key_lengths[b]):
        return False
    if p.mask is not None:
        m = p.mask
        at = (b if m.shape[0] > 1 else 0, h if m.shape[1] > 1 else 0)
        return bool(m[at][i if m.shape[2] > 1 else 0, j if m.shape[3] > 1 else 0])
    return True


def problem(nq: int, nk: int, batch: int = 2, **options: object) -> Problem:
    return Problem(
        torch.zeros(batch, 2, nq, 1), torch.zeros(batch, 1, nk, 1), torch.zeros(batch, 1, nk, 1), **options
    )  # type: ignore[arg-type]


SIZES = [(1, 1), (3, 3), (5, 2), (2, 6), (4, 0)]


@pytest.mark.parametrize(("nq", "nk"), SIZES)
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("window", [None, (0, 0), (1, 0), (None, 1), (2, None), (1, 3)])
def test_causal_and_window(
    nq: int, nk: int, causal: str | None, window: tuple[int | None, int | None]
) -> None:
    p = problem(nq, nk, causal=causal, window=window)
    assert torch.equal(p.visible(), by_loops(p))


@pytest.mark.parametrize(("nq", "nk"), SIZES[1:4])
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("shape", [(1, 1, 0, 0), (0, 0, 0, 0), (0, 1, 1, 0), (1, 0, 0, 1)])
def test_dense_and_lengths(nq: int, nk: int, causal: str | None, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(nq + nk)
    full = (2, 2, nq, nk)
    mask = torch.rand([s or f for s, f in zip(shape, full, strict=True)], generator=generator) < 0.6
    p = problem(nq, nk, causal=causal, mask=mask, key_lengths=torch.tensor([nk, nk // 2]))
    assert torch.equal(p.visible(), by_loops(p))


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("window", [None, (1, 0), (None, 0)])
@pytest.mark.parametrize("ends", [([0, 2, 2, 7], [0, 3, 5, 6]), ([0, 0, 7], [0, 4, 6]), ([0, 7], [0, 6])])
def test_packed_segments(
    causal: str | None, window: tuple[int | None, int | None], ends: tuple[list[int], list[int]]
) -> None:
    q, k = (torch.tensor(x) for x in ends)
    p = problem(7, 6, batch=1, causal=causal, window=window, cu_seqlens_q=q, cu_seqlens_k=k)
    assert torch.equal(p.visible(), by_loops(p))


def test_masks_combine() -> None:
    from flashcheck.masks import Causal, Diagonal, Everything, Window, dense

    diagonal = Diagonal(4, 4, "top_left")
    causal, band = Causal(diagonal), Window(diagonal, 0, 1)
    rows = torch.arange(4)
    a, b = (dense(m, 1, 1, rows, 4) for m in (causal, band))
    assert torch.equal(dense(causal & band, 1, 1, rows, 4), a & b)
    assert torch.equal(dense(causal | band, 1, 1, rows, 4), a | b)
    assert bool(dense(Everything() | causal, 1, 1, rows, 4).all())


def test_rows_are_a_selection_of_the_whole() -> None:
    p = problem(6, 9, causal="bottom_right", window=(2, 1))
    rows = torch.tensor([4, 1])
    assert torch.equal(p.visible(rows), p.visible()[:, :, rows])
