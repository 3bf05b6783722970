"""Conversions from fp32: rounding, overflow, NaN, subnormal results."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashcheck.formats import BF16, E4M3, E5M2, FP16, Format, round_nearest, round_toward_zero
from flashcheck.probe.arguments import Arguments
from flashcheck.probe.findings import CastFinding, Platform

TARGETS = (BF16, FP16, E4M3, E5M2)


def cast(x: Tensor, fmt: Format, platform: Platform) -> Tensor:
    """float32 ``x`` converted to ``fmt`` by the platform, then widened exactly to float64."""
    if platform == "torch":
        return x.to(fmt.dtype).double()
    from flashcheck.probe.triton_code import cast_kernel, launch

    out = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    launch(cast_kernel, x.numel(), x, out)
    return out.double()


def measure_cast(fmt: Format, platform: Platform, arguments: Arguments, device: torch.device) -> CastFinding:
    """How fp32 becomes ``fmt``; a conversion that cannot run here gives a finding that says why."""
    try:
        return _measure(fmt, platform, arguments, device)
    except Exception as error:  # a compiler, a driver or the interpreter may refuse in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return CastFinding(target=fmt.name, platform=platform, failed=reason)


def _measure(fmt: Format, platform: Platform, arguments: Arguments, device: torch.device) -> CastFinding:
    tested = wrong = not_truncated = 0
    example = ""
    nan_kept = True
    for x in arguments.chunks(device):
        exact, got = x.double(), cast(x, fmt, platform)
        inside = exact.abs() < fmt.overflow_threshold
        expected = round_nearest(exact, fmt)
        bad = inside & ~(got == expected)
        tested += int(inside.sum())
        wrong += (count := int(bad.sum()))
        if count:
            not_truncated += int((inside & (got != round_toward_zero(exact, fmt))).sum())
            if not example:
                i = int(bad.double().argmax())
                example = f"{float(x[i]).hex()} gives {float(got[i]).hex()}, not {float(expected[i]).hex()}"
        nan_kept &= bool(torch.isnan(got[torch.isnan(x)]).all())
    limit = fmt.overflow_threshold
    finite = [limit, 2 * limit, 1.5 * limit] if limit * 2 < 3e38 else [limit, 3.4028234663852886e38]
    probes = torch.tensor((finite + [torch.inf] * 4)[:4] * 256, dtype=torch.float32, device=device)
    out = cast(probes, fmt, platform)[:4]
    kinds = sorted({_kind(float(y), fmt) for x, y in zip(probes[:4], out, strict=True) if torch.isfinite(x)})
    return CastFinding(
        target=fmt.name,
        platform=platform,
        tested=tested,
        exhaustive=arguments.exhaustive,
        wrong=wrong,
        rounding="nearest even" if not wrong else "other" if not_truncated else "toward zero",
        example=example,
        overflow=" or ".join(kinds),
        infinity=_kind(float(out[3]), fmt),
        nan_kept=nan_kept,
    )


def _kind(y: float, fmt: Format) -> str:
    if math.isnan(y):
        return "NaN"
    if abs(y) == torch.inf:
        return "infinity"
    return "saturates" if abs(y) == fmt.max_finite else f"{y:g}"
