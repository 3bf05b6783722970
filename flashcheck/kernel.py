"""The kernel protocol: what a kernel declares, and how the checker calls it.

Three things fit, from least to most declared:

* a plain callable with an SDPA-like signature, ``f(q, k, v, *, attn_mask=, is_causal=, scale=)``;
* any callable that carries ``__flashcheck__``, a dict of plain data and functions (so a kernel's
  package need not import flashcheck);
* a ``Kernel`` object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from flashcheck import arithmetic
from flashcheck.arithmetic import INTERPRETER, Arithmetic, Machine
from flashcheck.errors import ArgumentError, UnknownNameError
from flashcheck.flushing import flushed_formats
from flashcheck.formats import format_named
from flashcheck.problem import OPTIONS, Problem

GRADIENT_NAMES = ("dq", "dk", "dv", "dbias", "dsink", "dscale")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a kernel says it supports; certified means that all of it was judged.

    Attributes:
        dtypes: names of formats of q, k, v.
        options: names out of ``problem.OPTIONS``.
        causal: alignments it supports.
        head_dim: smallest and largest head dim; head_dim_multiple: which divide it.
        value_dim_differs: v's dim may differ from q's.
        gqa: fewer key/value heads than query heads.
        lse: returns the log-sum-exp.
        empty_rows: rows that see no key follow the contract.
        cross_lengths: Nq may differ from Nk.
        length_multiple: which divides Nq and Nk.
        fewest_keys: the smallest Nk that is not 0.
        zero_length: Nk and Nq may be 0.
        any_strides: q, k, v may be any view.
        isolates_nonfinite: NaN and inf in visible data reach the rows that see them and no other.
        deterministic: bitwise the same result each time.
        batch_invariant: a head's bits do not depend on what else is in the batch, nor on its place there.
        rejects_illegal: an illegal argument raises before anything is computed.
        devices: device types it runs on.
        not_together: pairs of features that the kernel does not take in one call: names of options,
            or ``"nonpositive_scale"`` (a scale that is zero or negative).
        nonpositive_scale: the scale may be zero or negative.
        gradients: what the backward returns, out of dq, dk, dv, dbias, dsink, dscale; dscale is one fp32
            number, the sum of dS (q . k) over all pairs, dS as it is before it is rounded for products.
        dlse: the backward takes a gradient of the log-sum-exp.
    """

    dtypes: tuple[str, ...] = ("fp16", "bf16", "fp32")
    options: tuple[str, ...] = ("scale", "causal")
    causal: tuple[str, ...] = ("top_left",)
    head_dim: tuple[int, int] = (1, 256)
    head_dim_multiple: int = 1
    value_dim_differs: bool = False
    gqa: bool = False
    lse: bool = False
    empty_rows: bool = False
    cross_lengths: bool = True
    length_multiple: int = 1
    fewest_keys: int = 1
    zero_length: bool = False
    any_strides: bool = True
    isolates_nonfinite: bool = True
    deterministic: bool = True
    batch_invariant: bool = False
    rejects_illegal: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    not_together: tuple[tuple[str, str], ...] = ()
    nonpositive_scale: bool = True
    gradients: tuple[str, ...] = ("dq", "dk", "dv")
    dlse: bool = False

    def __post_init__(self) -> None:
        for name in self.dtypes:
            format_named(name)
        for name in self.options:
            if name not in OPTIONS:
                raise UnknownNameError("capabilities option", name, OPTIONS)
        for pair in self.not_together:
            for name in pair:
                if name not in (*OPTIONS, "nonpositive_scale"):
                    raise UnknownNameError("capabilities not_together", name, (*OPTIONS, "nonpositive_scale"))
        for name in self.gradients:
            if name not in GRADIENT_NAMES:
                raise UnknownNameError("capabilities gradients", name, GRADIENT_NAMES)
        low, high = self.head_dim
        if not 1 <= low <= high:
            raise ArgumentError("capabilities head_dim", self.head_dim, "1 <= smallest <= largest")
        for name in ("length_multiple", "fewest_keys"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"capabilities {name}", getattr(self, name), "a positive integer")

    def whole(self, length: int) -> int:
        """The next length that the kernel takes."""
        return -(-length // self.length_multiple) * self.length_multiple

    def refuses(self, problem: Problem) -> str | None:
        """Why the declaration excludes this problem; None if it does not."""
        if problem.format.name not in self.dtypes:
            return f"dtype {problem.format.name} is not declared"
        for name in problem.options():
            if name not in self.options:
                return f"option {name} is not declared"
        if problem.causal is not None and problem.causal not in self.causal:
            return f"causal={problem.causal} is not declared"
        for dim in (problem.head_dim, problem.value_dim):
            if not self.head_dim[0] <= dim <= self.head_dim[1] or dim % self.head_dim_multiple:
                return f"head dim {dim} is not declared"
        if problem.value_dim != problem.head_dim and not self.value_dim_differs:
            return "a value dim other than the head dim is not declared"
        if problem.group != 1 and not self.gqa:
            return "grouped key/value heads are not declared"
        if problem.num_queries != problem.num_keys and not self.cross_lengths:
            return "Nq != Nk is not declared"
        for length in (problem.num_queries, problem.num_keys):
            if length % self.length_multiple:
                return f"a length of {length} is not declared"
        if 0 < problem.num_keys < self.fewest_keys:
            return f"Nk = {problem.num_keys} is not declared"
        if 0 in (problem.num_queries, problem.num_keys) and not self.zero_length:
            return "zero queries or keys are not declared"
        if problem.effective_scale <= 0 and not self.nonpositive_scale:
            return "a scale of zero or less is not declared"
        features = {*problem.options(), *(["nonpositive_scale"] if problem.effective_scale <= 0 else [])}
        for first, second in self.not_together:
            if first in features and second in features:
                return f"{first} together with {second} is not declared"
        return None

    def describe(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What a forward returned: out (batch, heads, Nq, value_dim); lse (batch, heads, Nq) or None."""

    out: Tensor
    lse: Tensor | None = None


def _no_faults() -> list[str]:
    return []


def default_arithmetic(problem: Problem) -> Arithmetic:
    """What is assumed of a kernel that declares nothing: P in the input format, any tiling."""
    return arithmetic.flash(problem.format)


def machine_for(device: torch.device) -> Machine:
    """The machine model of a torch device: the CPU is IEEE, but for matrix products that are found to flush
    subnormal numbers; of GPUs only Hopper is modelled.

    Raises ArgumentError for a device whose arithmetic nobody has described.
    """
    if device.type == "cpu":
        return arithmetic.flushing(arithmetic.IEEE, flushed_formats())
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        return arithmetic.HOPPER
    raise ArgumentError("device", device, "cpu, or cuda of compute capability 9.x (Hopper)")


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel under test.

    Attributes:
        name: as a user types it.
        forward: takes a Problem, returns a ForwardResult.
        backward: takes a Problem (with dout), out and lse; returns gradients by name; or None.
        capabilities: what it declares.
        arithmetic: the declared arithmetic for a problem.
        machine: the machine for a device type.
        self_test: faults of the platform that would void a verdict (empty: none).
        signature: what it is compiled for, given a problem (any value that can be printed); None: not said.
        source: where it comes from, for certificates.
        orders: name -> a context manager, made from a seed, inside of which that order is another one than
            usual: in which programs are launched, where the pages of a cache lie. It gives something whose
            length says how much came in another order. For kernels whose bits may not depend on it.
    """

    name: str
    forward: Callable[[Problem], ForwardResult]
    backward: Callable[[Problem, Tensor, Tensor], Mapping[str, Tensor]] | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    arithmetic: Callable[[Problem], Arithmetic] = default_arithmetic
    machine: Callable[[torch.device], Machine] = machine_for
    self_test: Callable[[], list[str]] = _no_faults
    signature: Callable[[Problem], object] | None = None
    source: str = ""
    orders: Mapping[str, Callable[[int], AbstractContextManager[Sized]]] = field(default_factory=dict)


def as_kernel(thing: object, name: str) -> Kernel:
    """A Kernel from a Kernel, a callable with ``__flashcheck__``, or an SDPA-like callable."""
    if isinstance(thing, Kernel):
        return thing
    declaration = getattr(thing, "__flashcheck__", None)
    if declaration is not None:
        return _from_declaration(dict(declaration), name)
    if callable(thing):
        return _from_callable(thing, name)
    raise ArgumentError("KERNEL", f"{name} ({type(thing).__name__})", "a Kernel or a callable")


def _from_callable(function: Callable[..., Any], name: str) -> Kernel:
    """By the names in its signature: flash-attn's convention or torch's."""
    from flashcheck.adapters.flash_attn_like import follows_flash_attn, from_flash_attn_like

    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    if follows_flash_attn(parameters):
        return from_flash_attn_like(function, name, source=_source_of(function))
    return from_sdpa_like(function, name)


_DECLARATION_KEYS = (
    "name",
    "forward",
    "backward",
    "self_test",
    "capabilities",
    "arithmetic",
    "signature",
    "orders",
)


def _from_declaration(data: dict[str, Any], name: str) -> Kernel:
    for key in data:
        if key not in _DECLARATION_KEYS:
            raise UnknownNameError("__flashcheck__ key", key, _DECLARATION_KEYS)
    if "forward" not in data:
        raise ArgumentError("__flashcheck__", sorted(data), "a dict with at least 'forward'")
    forward, backward, declared = data["forward"], data.get("backward"), data.get("arithmetic")
    # A declaration may ask for the options of the call, as keyword arguments by their contract names.
    by_options = declared is not None and "options" in inspect.signature(declared).parameters

    def run_forward(problem: Problem) -> ForwardResult:
        out, lse = forward(problem.q, problem.k, problem.v, **call_options(problem))
        return ForwardResult(out, lse)

    def run_backward(problem: Problem, out: Tensor, lse: Tensor) -> Mapping[str, Tensor]:
        assert backward is not None
        extra = {} if problem.dlse is None else {"dlse": problem.dlse}
        tensors = (problem.dout, problem.q, problem.k, problem.v, out, lse)
        gradients: Mapping[str, Tensor] = backward(*tensors, **extra, **call_options(problem))
        return gradients

    def arithmetic_of(problem: Problem) -> Arithmetic:
        if declared is None:
            return default_arithmetic(problem)
        sizes = (problem.head_dim, problem.value_dim, problem.num_queries, problem.num_keys)
        extra = {"options": call_options(problem)} if by_options else {}
        data = declared(problem.format.name, *sizes, problem.q.device.type, **extra)
        if problem.cu_seqlens_k is not None:
            # Tiles of a packed batch start at each segment's first row; a tiling of all keys is another.
            data = {**data, "block_keys": None, "block_queries": None, "order": "unknown"}
        return arithmetic.arithmetic_from({"input_format": problem.format.name, **data})

    def signature_of(problem: Problem) -> object:
        return data["signature"](problem.q, problem.k, problem.v, **call_options(problem))

    capabilities = _capabilities_from(data.get("capabilities", {}))
    return Kernel(
        name=str(data.get("name", name)),
        forward=run_forward,
        backward=run_backward if backward is not None else None,
        capabilities=capabilities,
        arithmetic=arithmetic_of,
        machine=lambda device: INTERPRETER if device.type == "cpu" else machine_for(device),
        self_test=data.get("self_test", _no_faults),
        signature=signature_of if data.get("signature") is not None else None,
        source=_source_of(forward),
        orders=dict(data.get("orders", {})),
    )


def _capabilities_from(data: Mapping[str, Any]) -> Capabilities:
    known = {f.name for f in fields(Capabilities)}
    for key in data:
        if key not in known:
            raise UnknownNameError("capabilities key", key, known)
    converted: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return Capabilities(**converted)


def call_options(problem: Problem) -> dict[str, Any]:
    """The options that a problem sets, as keyword arguments by their contract names."""
    options: dict[str, Any] = {}
    for name in problem.options():
        if name == "cu_seqlens":
            options |= {"cu_seqlens_q": problem.cu_seqlens_q, "cu_seqlens_k": problem.cu_seqlens_k}
        else:
            options[name] = getattr(problem, name)
    return options


def from_sdpa_like(function: Callable[..., Tensor], name: str) -> Kernel:
    """A Kernel from a callable with the signature of ``scaled_dot_product_attention``.

    What its signature lacks is not declared: ``is_causal`` (top left), ``attn_mask``, ``scale``,
    ``enable_gqa``. Of scales, positive ones are: torch's own back ends give NaN for others.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins carry no signature: assume torch's own
        parameters = dict.fromkeys(("attn_mask", "is_causal", "scale", "enable_gqa"))  # type: ignore[assignment]
    takes = {n for n in ("attn_mask", "is_causal", "scale", "enable_gqa") if n in parameters}
    options = [
        o for o, n in (("scale", "scale"), ("causal", "is_causal"), ("mask", "attn_mask")) if n in takes
    ]

    def run_forward(problem: Problem) -> ForwardResult:
        keywords: dict[str, Any] = {}
        if problem.scale is not None:
            keywords["scale"] = problem.scale
        if problem.causal is not None:
            keywords["is_causal"] = True
        if problem.mask is not None:
            keywords["attn_mask"] = problem.mask
        if problem.group != 1:
            keywords["enable_gqa"] = True
        return ForwardResult(function(problem.q, problem.k, problem.v, **keywords))

    capabilities = Capabilities(options=tuple(options), gqa="enable_gqa" in takes, nonpositive_scale=False)
    return Kernel(name=name, forward=run_forward, capabilities=capabilities, source=_source_of(function))


def _source_of(function: object) -> str:
    try:
        return f"{inspect.getsourcefile(function) or ''}"  # type: ignore[arg-type]
    except TypeError:
        return ""
