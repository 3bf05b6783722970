"""The matrix units that can be called here, behind one signature."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.formats import BF16, E4M3, E5M2, FP16, FP32, Format
from flashcheck.probe.findings import Platform


@dataclass(frozen=True, slots=True)
class Unit:
    """One way to multiply matrices.

    Attributes:
        name: as reports print it. platform: whose product it is.
        operands: storage of both factors.
        rows, inner, columns: shape of a tile.
        precision: ``input_precision`` of tl.dot.
        imprecise: ``max_num_imprecise_acc`` of tl.dot (None: Triton's default).
    """

    name: str
    platform: Platform
    operands: Format
    rows: int = 64
    inner: int = 64
    columns: int = 64
    precision: str = "ieee"
    imprecise: int | None = None

    def multiply_add(self, a: Tensor, b: Tensor, c: Tensor, device: torch.device) -> Tensor:
        """c + a b, float64 on the CPU.

        Args:
            a: (P, rows, inner), b: (P, inner, columns): float64 values of the operands' format.
            c: (P, rows): fp32 values, added to every column of a row.
        """
        store = self.operands.dtype
        a, b, c = (x.to(device, t) for x, t in ((a, store), (b, store), (c, torch.float32)))
        if self.platform == "torch":
            # No accumulator goes in: c is one more product, with the factor 1.
            start = c.unsqueeze(-1).to(store)
            one = torch.ones(a.shape[0], 1, self.columns, dtype=store, device=device)
            out = torch.cat([start, a], -1) @ torch.cat([one, b], -2)
            return out.double().cpu()
        from flashcheck.probe.triton_code import dot_kernel

        out = torch.empty(a.shape[0], self.rows, self.columns, dtype=torch.float32, device=device)
        dot_kernel[(a.shape[0],)](
            a.contiguous(),
            b.contiguous(),
            c.contiguous(),
            out,
            M=self.rows,
            K=self.inner,
            N=self.columns,
            PRECISION=self.precision,
            IMPRECISE=self.imprecise,
            num_warps=4,
        )
        return out.double().cpu()


def triton_units(compiled: bool) -> Iterator[Unit]:
    """Products through tl.dot. Compiled code uses one instruction for 64 rows and another for 16, so both
    are measured; the interpreter knows no instructions."""
    if not compiled:
        for fmt in (FP16, BF16, E4M3, E5M2, FP32):
            yield Unit("tl.dot", "triton", fmt, rows=256, inner=32, columns=256)
        return
    for rows in (64, 16):
        for fmt in (FP16, BF16):
            yield Unit(f"tl.dot {rows} rows", "triton", fmt, rows=rows)
        for fmt in (E4M3, E5M2):
            yield Unit(f"tl.dot {rows} rows", "triton", fmt, rows=rows, inner=128)
        yield Unit(f"tl.dot {rows} rows tf32", "triton", FP32, rows=rows, inner=32, precision="tf32")
    for fmt in (E4M3, E5M2):
        name = "tl.dot 64 rows max_num_imprecise_acc=0"
        yield Unit(name, "triton", fmt, inner=128, imprecise=0)
    yield Unit("tl.dot ieee", "triton", FP32, rows=16, inner=32, columns=16)


def torch_units() -> Iterator[Unit]:
    """torch's own product of fp32 matrices, as the settings of the process leave it."""
    yield Unit("torch.matmul", "torch", FP32)
