"""The Machine that a probe implies, and where a declared one claims more than was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from flashcheck.arithmetic import IEEE_FP32, Accumulator, Machine
from flashcheck.formats import format_named
from flashcheck.probe.findings import (
    AdditionFinding,
    FunctionFinding,
    Platform,
    ProbeReport,
    ProductFinding,
)
from flashcheck.probe.products import model_of

_UNIT = 2.0**-24
_LENGTHS = (1, 8, 16, 32, 64, 128, 512, 4096)
_SMALLEST = 2.0**-149


def platform_of(machine: Machine, device_type: str) -> Platform:
    """Whose operations a kernel with this declared machine uses: a GPU is measured through Triton."""
    return "triton" if device_type != "cpu" or machine.name == "triton-interpreter" else "torch"


def machine_from(report: ProbeReport, platform: Platform) -> Machine:
    """The Machine that the findings of a platform imply; what was not measured keeps the usual value.

    Largest errors come out as measured: a proof for the device where they are exhaustive, else of the sample.
    """
    functions = _functions(report, platform)
    addition = _addition(report, platform)
    usual = Machine("")
    base = functions.get("exp2") if platform == "triton" else functions.get("exp")
    quotients = [functions[n].relative for n in ("division", "product with reciprocal") if n in functions]
    logarithms = [
        (functions[n], factor) for n, factor in (("log", 1.0), ("log2", math.log(2))) if n in functions
    ]
    tanh = functions.get("tanh") or functions.get("tanh by sigmoid")
    accumulators: dict[str, Accumulator] = {}
    for product in _gating(report, platform):
        model = model_of(product)
        if model is not None and product.operands != "fp32":
            known = accumulators.get(product.operands)
            if known is None or model.gamma(64) > known.gamma(64):
                accumulators[product.operands] = model
    for product in report.products:
        if product.platform == platform and _flushes(product):
            unit = accumulators.get(product.operands, IEEE_FP32)
            accumulators[product.operands] = replace(unit, flush_subnormals=True)
    return Machine(
        name=f"probed {platform} on {report.device.name}",
        accumulators=accumulators,
        vector=IEEE_FP32 if addition is None else _vector(addition),
        exp_error=base.relative * _UNIT if base else usual.exp_error,
        exp_flush=max(base.flush, _SMALLEST) if base else usual.exp_flush,
        division_error=max(quotients) * _UNIT if quotients else usual.division_error,
        log_absolute=max(f.absolute * k for f, k in logarithms) * _UNIT if logarithms else usual.log_absolute,
        log_relative=max(f.relative_above_one for f, _ in logarithms) * _UNIT
        if logarithms
        else usual.log_relative,
        tanh_error=tanh.absolute * _UNIT if tanh else usual.tanh_error,
        fused_multiply_add=bool(addition and addition.explicit),
    )


def contradictions(
    declared: Machine, report: ProbeReport, platform: Platform, formats: Iterable[str]
) -> list[str]:
    """Where ``declared`` claims less error than was measured, one line each, naming the field.

    Args:
        formats: names of the formats that matter; findings on others are left out.
    """
    matter = {*formats, "fp32"}
    out = [line for p in _gating(report, platform) if p.operands in matter for line in _product(declared, p)]
    for c in report.casts:
        if c.platform == platform and c.target in matter and c.wrong:
            out.append(
                f"cast fp32 to {c.target}: declared round to nearest even, measured {c.rounding}: "
                f"{c.wrong:,} of {c.tested:,} values differ; {c.example}"
            )
    addition = _addition(report, platform)
    if addition is not None:
        out += _sums("fp32 addition", "vector", declared.vector, _vector(addition))
        if declared.fused_multiply_add and not addition.explicit:
            out.append("fused_multiply_add: declared true, measured: fma(a, b, c) is rounded twice")
    return out + list(_errors(declared, _functions(report, platform), platform))


def _errors(declared: Machine, functions: dict[str, FunctionFinding], platform: Platform) -> Iterator[str]:
    exponential = functions.get("exp2" if platform == "triton" else "exp")
    if exponential is not None:
        yield from _less("exp_error", declared.exp_error, exponential.relative * _UNIT, exponential)
        yield from _less("exp_flush", declared.exp_flush, exponential.flush, exponential)
    for name in ("division", "product with reciprocal"):
        if name in functions:
            found = functions[name]
            yield from _less("division_error", declared.division_error, found.relative * _UNIT, found)
    for name, factor in (("log", 1.0), ("log2", math.log(2))):
        if name in functions:
            found = functions[name]
            yield from _less("log_absolute", declared.log_absolute, found.absolute * factor * _UNIT, found)
            yield from _less("log_relative", declared.log_relative, found.relative_above_one * _UNIT, found)
    tanh = functions.get("tanh")
    if tanh is not None:
        yield from _less("tanh_error", declared.tanh_error, tanh.absolute * _UNIT, tanh)


def _less(name: str, declared: float, measured: float, found: FunctionFinding) -> Iterator[str]:
    if not measured <= declared:
        where = f" at {found.at}" if found.at and name in ("exp_error", "division_error") else ""
        source = f"{found.platform} {found.function}{where}"
        yield f"{name}: declared {declared:.4g}, measured {measured:.4g} ({source})"


def _product(declared: Machine, found: ProductFinding) -> list[str]:
    label = f"{found.operands} products ({found.unit})"
    if found.wrong:
        return [f"{label}: {found.wrong}"]
    model = model_of(found)
    if model is None:
        return []
    field = f"accumulators[{found.operands}]" if found.operands in declared.accumulators else "vector"
    return _sums(label, field, declared.accumulator(format_named(found.operands)), model)


def _sums(label: str, field: str, declared: Accumulator, measured: Accumulator) -> list[str]:
    out = []
    if any(measured.gamma(n) > declared.gamma(n) * (1 + 2.0**-30) for n in _LENGTHS):
        names = [
            f"{name} {getattr(declared, name)} declared, {getattr(measured, name)} measured"
            for name in ("block", "fraction_bits", "precision", "rounding")
            if getattr(declared, name) != getattr(measured, name)
        ]
        out.append(f"{label}: {field} claims less error than measured: {'; '.join(names)}")
    if measured.flush_subnormals and not declared.flush_subnormals:
        out.append(
            f"{label}: {field}.flush_subnormals: declared false, measured: subnormal numbers are flushed"
        )
    return out


def _gating(report: ProbeReport, platform: Platform) -> list[ProductFinding]:
    """Products by the default path on operands as stored: TF32 and other accumulation are opt-in."""
    return [
        p
        for p in report.products
        if p.platform == platform and not p.failed and "tf32" not in p.unit and "imprecise" not in p.unit
    ]


def _flushes(found: ProductFinding) -> bool:
    return "flushed" in (found.subnormal_operands, found.subnormal_sums)


def _functions(report: ProbeReport, platform: Platform) -> dict[str, FunctionFinding]:
    return {f.function: f for f in report.functions if f.platform == platform and not f.failed}


def _addition(report: ProbeReport, platform: Platform) -> AdditionFinding | None:
    found = (a for a in report.additions if a.platform == platform and not a.failed)
    return next(found, None)


def _vector(addition: AdditionFinding) -> Accumulator:
    return Accumulator(
        rounding="nearest" if addition.addition == "nearest even" else "toward_zero",
        flush_subnormals=addition.subnormal_sums == "flushed",
    )
