"""How a stand-alone file calls a kernel: imports and two functions, ``attend`` and ``gradients``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from flashcheck.devices import INTERPRET
from flashcheck.kernel import Kernel, call_options
from flashcheck.loading import attribute_of
from flashcheck.problem import Problem

_SDPA = {
    "torch.sdpa.flash": "FLASH_ATTENTION",
    "torch.sdpa.math": "MATH",
    "torch.sdpa.cuda.math": "MATH",
    "torch.sdpa.cuda.flash": "FLASH_ATTENTION",
    "torch.sdpa.cuda.efficient": "EFFICIENT_ATTENTION",
    "torch.sdpa.cuda.cudnn": "CUDNN_ATTENTION",
}


@dataclass(frozen=True, slots=True)
class Call:
    """Pieces of the file.

    Attributes:
        imports: lines; environment: lines before torch is imported; text: the functions.
        notes: lines for the reader of the file.
    """

    imports: tuple[str, ...]
    text: str
    environment: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def call_of(name: str, kernel: Kernel, problem: Problem, device: str, *, gradients: bool) -> Call:
    """The call of ``name`` on the tensors that the file defines."""
    environment: tuple[str, ...] = ()
    if device == "cpu" and os.environ.get(INTERPRET) == "1" and "triton" not in name:
        environment = (f'os.environ.setdefault("{INTERPRET}", "1")',)
    thing = attribute_of(name)
    if not gradients and name in _SDPA and _sdpa_takes(problem):
        return _sdpa(name, problem, environment)
    if thing is None or isinstance(thing, Kernel):
        return _through_flashcheck(name, problem, environment, gradients)
    module, _, attribute = name.partition(":")
    imports = _import_lines(module, attribute)
    declaration = getattr(thing, "__flashcheck__", None)
    if declaration is None:
        return Call(imports, _sdpa_like(attribute, kernel, problem), environment)
    options = _keywords(call_options(problem))
    declared = f"{attribute}.__flashcheck__"
    text = f'def attend():\n    return {declared}["forward"](q, k, v{options})'
    if gradients:
        extra = ", dlse=dlse" if problem.dlse is not None else ""
        text += (
            "\n\n\ndef gradients():\n"
            f'    return {declared}["backward"](dout, q, k, v, stored_out, stored_lse{extra}{options})'
        )
    return Call(imports, text, environment)


def _keywords(options: dict[str, object]) -> str:
    return "".join(f", {n}={n if isinstance(x, Tensor) else repr(x)}" for n, x in options.items())


def _import_lines(module: str, attribute: str) -> tuple[str, ...]:
    if not module.endswith(".py"):
        return (f"from {module} import {attribute}",)
    stem = Path(module).stem
    return (
        "import importlib.util",
        "",
        f"spec = importlib.util.spec_from_file_location({stem!r}, {module!r})",
        "module = importlib.util.module_from_spec(spec)",
        f"sys.modules[{stem!r}] = module",
        "spec.loader.exec_module(module)",
        f"{attribute} = module.{attribute}",
    )


def _sdpa_like(attribute: str, kernel: Kernel, problem: Problem) -> str:
    del kernel
    parts = ["q, k, v"]
    if problem.scale is not None:
        parts.append(f"scale={problem.scale!r}")
    if problem.causal is not None:
        parts.append("is_causal=True")
    if problem.mask is not None:
        parts.append("attn_mask=mask")
    if problem.group != 1:
        parts.append("enable_gqa=True")
    return f"def attend():\n    return {attribute}({', '.join(parts)}), None"


def _sdpa_takes(problem: Problem) -> bool:
    options = set(problem.options())
    return options <= {"scale", "causal", "mask", "bias"} and not {"mask", "bias"} <= options


def _sdpa(name: str, problem: Problem, environment: tuple[str, ...]) -> Call:
    parts = ["q", "k", "v"]
    if problem.mask is not None or problem.bias is not None:
        shape = (problem.batch, problem.num_heads, problem.num_queries, problem.num_keys)
        parts.append(f"attn_mask={'mask' if problem.mask is not None else 'bias.to(q.dtype)'}.expand{shape}")
    if problem.causal is not None:
        parts.append("is_causal=True")
    if problem.scale is not None:
        parts.append(f"scale={problem.scale!r}")
    if problem.group != 1:
        parts.append("enable_gqa=True")
    text = (
        "def attend():\n"
        f"    with sdpa_kernel(SDPBackend.{_SDPA[name]}):\n"
        f"        return scaled_dot_product_attention({', '.join(parts)}), None"
    )
    imports = (
        "from torch.nn.attention import SDPBackend, sdpa_kernel",
        "from torch.nn.functional import scaled_dot_product_attention",
    )
    return Call(imports, text, environment)


def _through_flashcheck(name: str, problem: Problem, environment: tuple[str, ...], gradients: bool) -> Call:
    """For kernels that are flashcheck's own objects, adapters and mutants: they need its Problem anyway."""
    options = _keywords(call_options(problem))
    extra = "".join(
        f", {n}={getattr(problem, n)!r}"
        for n in ("q_descale", "k_descale", "v_descale")
        if getattr(problem, n) != 1.0
    ) + "".join(f", {n}={n}" for n in ("dout", "dlse") if getattr(problem, n) is not None)
    text = (
        f"kernel = load({name!r})\n\n\n"
        "def problem():\n"
        f"    return Problem(q, k, v{options}{extra})\n\n\n"
        "def attend():\n"
        "    result = kernel.forward(problem())\n"
        "    return result.out, result.lse"
    )
    if gradients:
        text += "\n\n\ndef gradients():\n    return kernel.backward(problem(), stored_out, stored_lse)"
    imports = ("from flashcheck.loading import load", "from flashcheck.problem import Problem")
    return Call(imports, text, environment, (f"{name} is called through flashcheck, which defines it.",))
