"""exp2, exp, logarithms, tanh, reciprocal and division against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashcheck.formats import FP32, ulp
from flashcheck.probe.arguments import Arguments
from flashcheck.probe.findings import AdditionFinding, FunctionFinding, Platform

_SMALLEST, _LARGEST = 2.0**-126, FP32.max_finite
_UNIT = 2.0**-24
_ROUNDS_TO_ZERO = 2.0**-150  # half the smallest subnormal number: a correct result is zero up to here


@dataclass(frozen=True, slots=True)
class Function:
    """A function of one argument, or of an argument and a numerator that is drawn for it.

    Attributes:
        exact: on float64. torch: torch's own on float32.
        binary: takes (numerator, x).
        positive_normal: only positive normal arguments count (logarithms).
    """

    name: str
    exact: Callable[..., Tensor]
    torch: Callable[..., Tensor] | None
    binary: bool = False
    positive_normal: bool = False


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b


def _by_reciprocal(a: Tensor, b: Tensor) -> Tensor:
    return a * (1.0 / b)


def _by_sigmoid(x: Tensor) -> Tensor:
    return 2 * torch.sigmoid(2 * x) - 1


FUNCTIONS = {
    f.name: f
    for f in (
        Function("exp2", torch.exp2, torch.exp2),
        Function("exp", torch.exp, torch.exp),
        Function("log2", torch.log2, torch.log2, positive_normal=True),
        Function("log", torch.log, torch.log, positive_normal=True),
        Function("reciprocal", torch.reciprocal, torch.reciprocal),
        Function("division", _divide, _divide, binary=True),
        Function("product with reciprocal", _divide, _by_reciprocal, binary=True),
        Function("tanh", torch.tanh, torch.tanh),
        Function("tanh by sigmoid", torch.tanh, _by_sigmoid),
    )
}

_SPECIAL: dict[str, tuple[tuple[float, float], ...]] = {
    "exp2": ((0.0, 1.0), (torch.inf, torch.inf), (-torch.inf, 0.0), (torch.nan, torch.nan)),
    "exp": ((0.0, 1.0), (torch.inf, torch.inf), (-torch.inf, 0.0), (torch.nan, torch.nan)),
    "log2": ((1.0, 0.0), (0.0, -torch.inf), (torch.inf, torch.inf), (torch.nan, torch.nan)),
    "log": ((1.0, 0.0), (0.0, -torch.inf), (torch.inf, torch.inf), (torch.nan, torch.nan)),
    "reciprocal": ((1.0, 1.0), (torch.inf, 0.0), (0.0, torch.inf), (torch.nan, torch.nan)),
    "tanh": ((0.0, 0.0), (torch.inf, 1.0), (-torch.inf, -1.0), (torch.nan, torch.nan)),
    "tanh by sigmoid": ((0.0, 0.0), (torch.inf, 1.0), (-torch.inf, -1.0), (torch.nan, torch.nan)),
}


def evaluate(function: Function, platform: Platform, x: Tensor, numerator: Tensor | None = None) -> Tensor:
    """The platform's value, float32."""
    operands = (x,) if numerator is None else (numerator, x)
    if platform == "torch":
        if function.torch is None:
            raise NotImplementedError(f"torch has no {function.name}")
        return function.torch(*operands)
    from flashcheck.probe.triton_code import binary_kernel, launch, unary_kernel

    out = torch.empty_like(x)
    kernel = unary_kernel if numerator is None else binary_kernel
    launch(kernel, x.numel(), *operands, out, OP=function.name)
    return out


def measure_function(
    function: Function, platform: Platform, arguments: Arguments, device: torch.device
) -> FunctionFinding:
    """Errors over the arguments; a function that cannot run here gives a finding that says why."""
    try:
        return _measure(function, platform, arguments, device)
    except Exception as error:  # a compiler, a driver or the interpreter may refuse in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return FunctionFinding(function=function.name, platform=platform, failed=reason)


@dataclass(slots=True)
class _Extremes:
    relative: float = 0.0
    at: float = 0.0
    ulps: float = 0.0
    absolute: float = 0.0
    above_one: float = 0.0
    flush: float = 0.0
    total: float = 0.0
    normal: int = 0

    def add(self, x: Tensor, exact: Tensor, got: Tensor) -> None:
        """One chunk: float64 arguments, exact values and computed values, where the function is defined."""
        size = exact.abs()
        zero = (got == 0) & (size > _ROUNDS_TO_ZERO)
        normal = (size >= _SMALLEST) & (size <= _LARGEST) & ~zero
        error = torch.where(normal, got - exact, 0.0).nan_to_num(torch.inf, torch.inf, -torch.inf)
        relative = error / torch.where(normal, size, 1.0)
        largest, place = relative.abs().max(0)
        if float(largest) > self.relative:  # a NaN is an infinite error
            self.relative, self.at = float(largest), float(x[place])
        self.ulps = max(self.ulps, float((error.abs() / ulp(torch.where(normal, size, 1.0), FP32)).max()))
        small = normal & (size <= 1)
        self.absolute = max(self.absolute, float(torch.where(small, error, 0.0).abs().max()))
        self.above_one = max(self.above_one, float(torch.where(small, 0.0, relative).abs().max()))
        self.flush = max(self.flush, float(torch.where(zero, size, 0.0).max()))
        self.total += float(relative.sum())
        self.normal += int(normal.sum())


def _measure(
    function: Function, platform: Platform, arguments: Arguments, device: torch.device
) -> FunctionFinding:
    found = _Extremes()
    for number, x in enumerate(arguments.chunks(device)):
        numerator = _numerators(x, number) if function.binary else None
        got = evaluate(function, platform, x, numerator).double()
        wide = x.double()
        exact = function.exact(wide) if numerator is None else function.exact(numerator.double(), wide)
        # A subnormal argument may be read as zero: the flush limits speak of results.
        defined = torch.isfinite(wide) & torch.isfinite(exact)
        if function.positive_normal:
            defined &= wide >= _SMALLEST
        elif function.binary or function.name == "reciprocal":
            defined &= wide.abs() >= _SMALLEST
        if function.name == "product with reciprocal":
            defined &= wide.abs() <= 2.0**126  # beyond, the reciprocal is subnormal and has fewer bits
        if not bool(defined.any()):
            continue
        defined &= exact.abs() <= _LARGEST * (1 - 2.0**-22)  # at the edge either of overflow and not is right
        found.add(*(torch.where(defined, y, 0.0) for y in (wide, exact, got)))
    return FunctionFinding(
        function=function.name,
        platform=platform,
        tested=arguments.count,
        exhaustive=arguments.exhaustive,
        relative=found.relative / _UNIT,
        at=found.at.hex(),
        ulps=found.ulps,
        bias=found.total / max(found.normal, 1) / _UNIT,
        absolute=found.absolute / _UNIT,
        relative_above_one=found.above_one / _UNIT,
        flush=found.flush,
        special=_special(function, platform, device),
    )


def _numerators(x: Tensor, number: int) -> Tensor:
    """A numerator for each divisor: its sign and exponent (1 where not normal), another significand."""
    codes = x.view(torch.int32).to(torch.int64)
    mixed = ((codes ^ (codes >> 15)) * 0x2C1B3C6D + number * 0x1F123BB5) & 0x7FFFFFFF
    significand = (mixed ^ (mixed >> 12)) & 0x7FFFFF
    exponent = codes & 0x7F800000
    exponent = torch.where((exponent == 0) | (exponent == 0x7F800000), 0x3F800000, exponent)
    return (exponent | significand).to(torch.int32).view(torch.float32)


def _special(function: Function, platform: Platform, device: torch.device) -> dict[str, str]:
    cases = _SPECIAL.get(function.name, ())
    if not cases:
        return {}
    x = torch.tensor([argument for argument, _ in cases] * 256, dtype=torch.float32, device=device)
    got = evaluate(function, platform, x)[: len(cases)].tolist()
    return {
        f"{argument:g}": f"{y:g}"
        for (argument, wanted), y in zip(cases, got, strict=True)
        if not (y == wanted or (math.isnan(y) and math.isnan(wanted)))
    }


def measure_addition(platform: Platform, device: torch.device) -> AdditionFinding:
    """fp32 addition, and whether a * b + c is rounded once."""
    try:
        return _measure_addition(platform, device)
    except Exception as error:  # a compiler, a driver or the interpreter may refuse in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return AdditionFinding(platform=platform, failed=reason)


def _measure_addition(platform: Platform, device: torch.device) -> AdditionFinding:
    u = 2.0**-23
    pairs = [(1.0, 1.5 * u), (-1.0, -1.5 * u), (1.0, 0.5 * u), (1 + u, 0.5 * u), (2.0**-140, 2.0**-140)]
    sides = torch.tensor(pairs, dtype=torch.float32, device=device).repeat(1024, 1)
    a, b = sides[:4096, 0].contiguous(), sides[:4096, 1].contiguous()
    square = torch.full((1024,), 1 + 2.0**-12, dtype=torch.float32, device=device)  # its square: 25 bits
    rest = -(square * square)
    if platform == "torch":
        sums, fused, explicit = a + b, square * square + rest, torch.addcmul(rest, square, square)
    else:
        from flashcheck.probe.triton_code import binary_kernel, fused_kernel, launch

        sums, fused, explicit = torch.empty_like(a), torch.empty_like(square), torch.empty_like(square)
        launch(binary_kernel, a.numel(), a, b, sums, OP="sum")
        launch(fused_kernel, 1024, square, square, rest, fused, EXPLICIT=False)
        launch(fused_kernel, 1024, square, square, rest, explicit, EXPLICIT=True)
    got = sums[: len(pairs)].double().tolist()
    nearest = [1 + 2 * u, -1 - 2 * u, 1.0, 1 + 2 * u]
    truncated = [1 + u, -1 - u, 1.0, 1 + u]
    return AdditionFinding(
        platform=platform,
        addition="nearest even" if got[:4] == nearest else "toward zero" if got[:4] == truncated else "other",
        subnormal_sums="kept" if got[4] == 2.0**-139 else "flushed",
        fused=bool(fused[0] != 0),
        explicit=bool(explicit[0] != 0),
    )
