"""Right arithmetic for Triton's CPU interpreter (``TRITON_INTERPRET=1``), where a release gets it wrong.

The interpreter keeps bf16 as uint16 codes and fp8 as uint8 codes. In releases 3.6 to 3.9 it computes
with those codes in places where the GPU computes with the values they stand for, and its conversions
round wrongly. What a GPU does, and what the repaired interpreter does:

* fp32 to bf16 rounds to nearest even; overflow gives inf; NaN stays NaN; subnormals are kept;
* conversions to e4m3fn and e5m2 round to nearest even and saturate (``cvt.rn.satfinite``: 470 and inf
  give 448, NaN stays NaN);
* bf16, e4m3fn and e5m2 to wider formats is exact for every code, NaN and inf included;
* ``+ - * / < == max min fma`` and unary operations on bf16 act on values, rounded once to nearest even;
* ``tl.dot`` on bf16 and fp8 operands multiplies values, in fp32;
* ``tl.maximum`` and ``tl.minimum`` drop a NaN unless asked to propagate it;
* a loop bound may be a runtime value (releases before 3.7 fail with numpy 2.4 or newer).

``repair`` asks ``self_test`` which of these are wrong in the running release and replaces only those,
so that a release that mended itself is left alone. What stays different from a GPU: products of fp16,
bf16 and fp8 are summed in full fp32 by numpy, not truncated as the tensor cores do; ``tl.exp2`` is
correct to one ulp and keeps subnormals.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

INF, NAN = float("inf"), float("nan")


@triton.jit
def _cast_kernel(p_in, p_out, N: tl.constexpr):
    o = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(p_out + o, tl.load(p_in + o).to(p_out.dtype.element_ty))


@triton.jit
def _arithmetic_kernel(p_a, p_b, p_out, N: tl.constexpr):
    o = tl.arange(0, N)
    b_a, b_b = tl.load(p_a + o), tl.load(p_b + o)
    tl.store(p_out + 0 * N + o, (b_a + b_b).to(tl.float32))
    tl.store(p_out + 1 * N + o, (b_a - b_b).to(tl.float32))
    tl.store(p_out + 2 * N + o, (b_a * b_b).to(tl.float32))
    tl.store(p_out + 3 * N + o, (b_a < b_b).to(tl.float32))
    tl.store(p_out + 4 * N + o, (-b_a).to(tl.float32))
    tl.store(p_out + 5 * N + o, (b_a / b_b).to(tl.float32))
    tl.store(p_out + 6 * N + o, tl.fma(b_a, b_b, b_b).to(tl.float32))
    tl.store(p_out + 7 * N + o, tl.maximum(b_a, b_b).to(tl.float32))
    tl.store(p_out + 8 * N + o, (b_a == b_b).to(tl.float32))


@triton.jit
def _dot_kernel(p_a, p_b, p_out, N: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(p_out + o, tl.dot(tl.load(p_a + o), tl.load(p_b + o)))


@triton.jit
def _maximum_kernel(p_a, p_b, p_out, N: tl.constexpr):
    o = tl.arange(0, N)
    b_a, b_b = tl.load(p_a + o), tl.load(p_b + o)
    tl.store(p_out + o, tl.maximum(b_a, b_b))
    tl.store(p_out + N + o, tl.minimum(b_a, b_b))
    tl.store(p_out + 2 * N + o, tl.maximum(b_a, b_b, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _loop_kernel(p_out, n):
    count = 0
    for i in tl.range(0, n):
        count += i
    tl.store(p_out, count)


def interpreted() -> bool:
    """True where kernels of this process run in the interpreter, False where they are compiled."""
    return not isinstance(_cast_kernel, triton.runtime.jit.JITFunction)


def _fp8_values(exponent_bits: int, largest_code: int) -> np.ndarray:
    """Values of codes 0..largest_code of an IEEE-like 8-bit format, ascending, float64."""
    fraction_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    code = np.arange(largest_code + 1)
    exponent, fraction = code >> fraction_bits, code & (2**fraction_bits - 1)
    significand = fraction / 2**fraction_bits + (exponent > 0)
    values: np.ndarray = significand * 2.0 ** (np.maximum(exponent, 1) - bias)
    return values


# Largest finite codes: e4m3fn has NaN at 0x7F only; e5m2 has inf at 0x7C and NaN above.
_FINITE = {tl.float8e4nv: _fp8_values(4, 0x7E), tl.float8e5: _fp8_values(5, 0x7B)}
_NAN_CODE = np.uint8(0x7F)


def _decode_table(dtype: tl.dtype) -> np.ndarray:
    positive = np.full(128, NAN, dtype=np.float32)
    positive[: len(_FINITE[dtype])] = _FINITE[dtype]
    if dtype == tl.float8e5:
        positive[0x7C] = INF
    return np.concatenate([positive, -positive])


_DECODE = {dtype: _decode_table(dtype) for dtype in _FINITE}
_MIDPOINTS = {dtype: (values[1:] + values[:-1]) / 2 for dtype, values in _FINITE.items()}
_CODED = frozenset({tl.bfloat16, *_FINITE})


def decode(codes: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Values (float32, exact) of bf16 (uint16), e4m3fn or e5m2 (uint8) codes."""
    if dtype == tl.bfloat16:
        values: np.ndarray = (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = _DECODE[dtype][codes]
    return values


def encode(values: np.ndarray, dtype: tl.dtype, truncate: bool = False) -> np.ndarray:
    """Codes of the values rounded once, to nearest even; fp8 saturates, bf16 overflows to inf.

    Args:
        values: any real numpy dtype; float64 is not rounded to float32 on the way.
        truncate: round toward zero instead (bf16 only).
    """
    if dtype == tl.bfloat16:
        return _encode_bf16(values, truncate)
    magnitude = np.abs(values.astype(np.float64))
    midpoints = _MIDPOINTS[dtype]
    # The code is the number of midpoints below the value, or at it where the code below is odd.
    code = np.searchsorted(midpoints, magnitude, side="left")
    tie = magnitude == midpoints[np.minimum(code, len(midpoints) - 1)]
    code = (code + (tie & (code % 2 == 1))).astype(np.uint8)
    code |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    return np.where(np.isnan(magnitude), _NAN_CODE, code)


def _encode_bf16(values: np.ndarray, truncate: bool) -> np.ndarray:
    if values.dtype not in (np.float32, np.float16):
        values = _round_to_odd(values.astype(np.float64))
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(values.shape)
    upper = bits >> np.uint32(16)
    half = np.uint32(0) if truncate else np.uint32(0x7FFF) + (upper & np.uint32(1))
    rounded = (bits + half) >> np.uint32(16)
    # The quiet bit keeps a NaN whose payload lies in the lower half a NaN.
    return np.where(np.isnan(values), upper | np.uint32(0x40), rounded).astype(np.uint16)


def _round_to_odd(values: np.ndarray) -> np.ndarray:
    """float64 to float32 such that a second rounding to 16 bits equals a single one."""
    with np.errstate(over="ignore"):
        nearest = values.astype(np.float32)
    toward_zero = np.where(np.abs(nearest) > np.abs(values), np.nextafter(nearest, np.float32(0)), nearest)
    inexact = np.isfinite(values) & (toward_zero != values)
    rounded: np.ndarray = (toward_zero.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32)
    return rounded


def _values(handle: Any) -> np.ndarray:
    dtype = handle.dtype.scalar
    return decode(handle.data, dtype) if dtype in _CODED else handle.data


def _handle(values: np.ndarray, dtype: tl.dtype) -> Any:
    """Interpreter tensor of a coded dtype; the result of a comparison is a boolean tensor."""
    from triton.runtime.interpreter import TensorHandle

    if values.dtype == np.bool_:
        return TensorHandle(values, tl.int1)
    return TensorHandle(encode(values, dtype), dtype)


def _replace(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Install ``replacement(original, self, ...)`` as ``owner.name``."""
    original = getattr(owner, name)

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    setattr(owner, name, replaced)


def _repair_casts() -> None:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype, _ir

    def cast(original: Any, self: Any, src: Any, dst_type: Any, rounding_mode: Any = None) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        extra = () if original.__name__ == "cast_impl" else (rounding_mode,)
        if source not in _CODED and target not in _CODED:
            return original(self, src, dst_type, *extra)
        values = _values(src)
        if target in _CODED:
            return TensorHandle(encode(values, target, rounding_mode == _ir.ROUNDING_MODE.RTZ), target)
        return TensorHandle(values.astype(_get_np_dtype(dst_type)), target)

    _replace(InterpreterBuilder, "cast_impl", cast)
    _replace(InterpreterBuilder, "create_fp_to_fp", cast)


def _repair_arithmetic() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    def binary(original: Any, self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar not in _CODED:
            return original(self, lhs, rhs, op)
        return _handle(op(_values(lhs), _values(rhs)), lhs.dtype.scalar)

    def unary(original: Any, self: Any, arg: Any, op: Any) -> Any:
        if arg.dtype.scalar not in _CODED:
            return original(self, arg, op)
        return _handle(op(_values(arg)), arg.dtype.scalar)

    def ternary(original: Any, self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        # A selection moves codes; only clipping computes with them.
        if lhs.dtype.scalar not in _CODED or op is not np.clip:
            return original(self, lhs, rhs, other, op)
        return _handle(op(_values(lhs), _values(rhs), _values(other)), lhs.dtype.scalar)

    def fma(original: Any, self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar not in _CODED:
            return original(self, x, y, z)
        addend = _values(z).astype(np.float64)
        product = _values(x).astype(np.float64) * _values(y)
        total = product + addend
        # Knuth's two-sum; an inexact even result moves to its odd neighbour on the side of the error,
        # so that rounding to 8 bits afterwards sees on which side of a tie the exact sum lies.
        back = total - product
        error = (product - (total - back)) + (addend - back)
        even = (total.view(np.int64) & 1) == 0
        move = even & (error != 0) & np.isfinite(error)
        total = np.where(move, np.nextafter(total, np.copysign(INF, error)), total)
        return _handle(total, z.dtype.scalar)

    def rsqrt(original: Any, self: Any, arg: Any) -> Any:
        if arg.dtype.scalar not in _CODED:
            return original(self, arg)
        return _handle(1 / np.sqrt(_values(arg)), arg.dtype.scalar)

    for name, replacement in (
        ("binary_op", binary),
        ("unary_op", unary),
        ("ternary_op", ternary),
        ("create_fma", fma),
        ("create_rsqrt", rsqrt),
    ):
        _replace(InterpreterBuilder, name, replacement)


def _repair_dot() -> None:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(
        original: Any, self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        if a.dtype.scalar not in _CODED and b.dtype.scalar not in _CODED:
            return original(self, a, b, d, input_precision, max_num_imprecise_acc)
        # Contiguous, because BLAS sums in another order where an operand is a transposed view.
        left, right = (np.ascontiguousarray(_values(x), dtype=np.float32) for x in (a, b))
        product = np.matmul(left, right)
        return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    _replace(InterpreterBuilder, "create_dot", dot)


def _repair_maximum() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)


def _repair_loop_bounds() -> None:
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch_tensor(tensor: type, *args: Any) -> None:
        original(tensor, *args)
        # Scalars are arrays of one element, which int() refuses from numpy 2.4 on.
        setattr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # noqa: B010

    interpreter._patch_lang_tensor = patch_tensor


def _quicken_launches() -> None:
    """Patch triton.language once a launch instead of once a device-function call; keep numpy quiet.

    The interpreter walks all of triton.language whenever a kernel calls a helper, and ``tl.max`` and
    ``tl.sum`` are helpers, so that this walk takes most of a kernel's time; half of the rest is a check
    of every integer operation for overflow, which compiled kernels make only in debug mode. A GPU
    overflows and makes NaN without a warning, and so does a launch here.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    launch: dict[str, Any] = {"depth": 0, "patched": set()}

    def execute(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        launch["depth"] += 1
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                # nanmax says so when a whole row is NaN.
                warnings.simplefilter("ignore", RuntimeWarning)
                return original(self, *args, **kwargs)
        finally:
            launch["depth"] -= 1
            launch["patched"].clear()

    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = self.__dict__.get("_language_modules")
        if modules is None:
            modules = frozenset(
                id(value) for value in self.fn.__globals__.values() if value is tl or value is tl.core
            )
            self._language_modules = modules
        if launch["depth"] and modules in launch["patched"]:
            try:
                return self.rewrite()(*args, **kwargs)
            except Exception as error:
                raise interpreter.InterpreterError(repr(error)) from error
        launch["patched"].add(modules)
        return original(self, *args, **kwargs)

    _replace(interpreter.GridExecutor, "__call__", execute)
    _replace(interpreter.InterpretedFunction, "__call__", call)


def _agree(got: torch.Tensor, expected: list[float]) -> bool:
    return torch.equal(
        torch.nan_to_num(got.double().flatten(), nan=12345.0),
        torch.nan_to_num(torch.tensor(expected, dtype=torch.float64), nan=12345.0),
    )


def cast(values: torch.Tensor, dtype: torch.dtype, block: int | None = None) -> torch.Tensor:
    """``values`` (contiguous, a power of two of them) converted to ``dtype`` by a kernel."""
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    block = block or values.numel()
    _cast_kernel[(values.numel() // block,)](values, out, block)
    return out


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product (fp32) of two contiguous square matrices by one ``tl.dot``."""
    out = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    _dot_kernel[(1,)](a, b, out, a.shape[0])
    return out


def _downcast_is_right(dtype: torch.dtype, pairs: list[tuple[float, float]], source: torch.dtype) -> bool:
    """Cast a value and its negative; the host widens the codes, which torch does exactly."""
    pairs = pairs + [(-value, -expected) for value, expected in pairs]
    values = torch.tensor([value for value, _ in pairs], dtype=source)
    return _agree(cast(values, dtype).double(), [expected for _, expected in pairs])


# Ties to even on both sides, a carry into the exponent, subnormals, overflow, inf and NaN. Lengths are
# powers of two, as tl.arange needs.
_BF16_PAIRS = [
    (1 + 2**-8, 1.0),
    (1 + 3 * 2**-8, 1 + 2**-6),
    (1 + 2**-8 + 2**-20, 1 + 2**-7),
    (2 - 2**-9, 2.0),
    (3 * 2.0**-134, 2.0**-132),
    (2.0**-134, 0.0),
    (3.4028234663852886e38, INF),
    (NAN, NAN),
]
_E4M3_PAIRS = [
    (1.9375, 2.0),
    (7.97, 8.0),
    (1.0625, 1.0),
    (470.0, 448.0),
    (INF, 448.0),
    (2.0**-10, 0.0),
    (3 * 2.0**-10, 2.0**-8),
    (NAN, NAN),
]
_E5M2_PAIRS = [
    (1.875, 2.0),
    (7.97, 8.0),
    (1.125, 1.0),
    (65000.0, 57344.0),
    (INF, 57344.0),
    (2.0**-17, 0.0),
    (3 * 2.0**-17, 2.0**-15),
    (NAN, NAN),
]


_BF16_CODES = [(1, 2.0**-133), (127, 127 * 2.0**-133)]
_E4M3_CODES = [(1, 2.0**-9), (0x7F, NAN)]
_E5M2_CODES = [(1, 2.0**-16), (2, 2.0**-15), (0x7C, INF), (0x7D, NAN)]


def _upcast_is_right(dtype: torch.dtype, pairs: list[tuple[int, float]]) -> bool:
    integer = torch.int16 if dtype == torch.bfloat16 else torch.uint8
    codes = torch.tensor([code for code, _ in pairs], dtype=integer).view(dtype)
    return _agree(cast(codes, torch.float32), [value for _, value in pairs])


def _arithmetic_is_right() -> bool:
    pairs = [(2.5, 2.0), (-1.0, 3.0), (1.0, 2.0**-8), (0.0, 0.5)]
    a, b = (torch.tensor(column, dtype=torch.bfloat16) for column in zip(*pairs, strict=True))
    out = torch.empty(9, len(pairs))
    _arithmetic_kernel[(1,)](a, b, out, len(pairs))
    x, y = a.float(), b.float()
    exact = [
        x + y,
        x - y,
        x * y,
        (x < y).float(),
        -x,
        x / y,
        x * y + y,
        torch.maximum(x, y),
        (x == y).float(),
    ]
    # The quotient is formed in fp32, as Triton's type rules say; all else is rounded to bf16.
    rounded = [value if row == 5 else value.bfloat16().float() for row, value in enumerate(exact)]
    return torch.equal(out + 0.0, torch.stack(rounded) + 0.0)


def _dot_is_right(dtype: torch.dtype) -> bool:
    index = torch.arange(256, dtype=torch.float32).view(16, 16)
    a, b = ((index * 7) % 13 - 6).to(dtype), ((index * 5) % 11 - 5).to(dtype)
    # The smallest positive code of the format in one row, and NaN in another.
    a[3, :] = 0
    a.view(torch.uint8 if a.element_size() == 1 else torch.int16)[3, 5] = 1
    a[4, 2] = NAN
    return _agree(dot(a, b), (a.double() @ b.double()).flatten().tolist())


def _maximum_is_right() -> bool:
    out = torch.empty(3, 2)
    _maximum_kernel[(1,)](torch.tensor([NAN, 1.0]), torch.tensor([1.0, NAN]), out, 2)
    return _agree(out.flatten(), [1.0, 1.0, 1.0, 1.0, NAN, NAN])


def _loop_is_right() -> bool:
    out = torch.zeros(1, dtype=torch.int32)
    _loop_kernel[(1,)](out, 4)
    return out.item() == 6


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Name of the fault, the probe that is True where the interpreter is right, and its repair.
_PROBES: list[tuple[str, Callable[[], bool], Callable[[], None]]] = [
    ("runtime loop bounds", _loop_is_right, _repair_loop_bounds),
    ("fp32 to bf16", lambda: _downcast_is_right(torch.bfloat16, _BF16_PAIRS, torch.float32), _repair_casts),
    ("fp32 to e4m3fn", lambda: _downcast_is_right(_E4M3, _E4M3_PAIRS, torch.float32), _repair_casts),
    ("fp32 to e5m2", lambda: _downcast_is_right(_E5M2, _E5M2_PAIRS, torch.float32), _repair_casts),
    ("fp16 to e4m3fn", lambda: _downcast_is_right(_E4M3, _E4M3_PAIRS, torch.float16), _repair_casts),
    ("bf16 to fp32", lambda: _upcast_is_right(torch.bfloat16, _BF16_CODES), _repair_casts),
    ("e4m3fn to fp32", lambda: _upcast_is_right(_E4M3, _E4M3_CODES), _repair_casts),
    ("e5m2 to fp32", lambda: _upcast_is_right(_E5M2, _E5M2_CODES), _repair_casts),
    ("bf16 arithmetic", _arithmetic_is_right, _repair_arithmetic),
    ("bf16 dot", lambda: _dot_is_right(torch.bfloat16), _repair_dot),
    ("e4m3fn dot", lambda: _dot_is_right(_E4M3), _repair_dot),
    ("e5m2 dot", lambda: _dot_is_right(_E5M2), _repair_dot),
    ("NaN in maximum and minimum", _maximum_is_right, _repair_maximum),
]


def self_test() -> list[str]:
    """Names of the faults found in the running interpreter; empty when right, and on a GPU."""
    if not interpreted():
        return []
    faults = []
    for name, is_right, _ in _PROBES:
        try:
            if not is_right():
                faults.append(name)
        except Exception as error:
            faults.append(f"{name}: {error}")
    return faults


_repaired: list[str] | None = None


def repair() -> list[str]:
    """Mend what ``self_test`` finds wrong; returns the names of the faults that were there.

    Idempotent, and without effect where kernels are compiled.

    Raises:
        RuntimeError: a fault remains, so that no number of this interpreter can be trusted.
    """
    global _repaired  # noqa: PLW0603
    if _repaired is not None:
        return _repaired
    if not interpreted():
        _repaired = []
        return _repaired
    faults = self_test()
    names = {fault.split(":")[0] for fault in faults}
    for mend in dict.fromkeys(mend for name, _, mend in _PROBES if name in names):
        mend()
    _quicken_launches()
    remaining = self_test()
    if remaining:
        raise RuntimeError(
            f"Triton {triton.__version__}: interpreter faults remain after repair: {remaining}"
        )
    _repaired = faults
    return _repaired
