"""What is run on a GPU machine: named jobs, each a command of this repository with files of its own."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ALL_SLOTS = 10_000
"""More than there are: such a job runs alone."""

FILL = 3600.0
"""No limit but the run's: such a job keeps what it has when it is interrupted."""

TORCH = {"cuda": ("flash", "efficient", "cudnn", "math"), "cpu": ("flash", "math")}
TUTORIAL = "triton.tutorial"
COMPILED = "torch.flex.compiled"
PACKAGES = {
    "jax.cuda.xla": "jax_plugins",  # what a jax with CUDA brings along
    "jax.cuda.cudnn": "jax_plugins",
    "jax.cuda.pallas": "jax_plugins",
    "flash_attn.4": "flash_attn",
}
"""Kernels of packages other than torch, and the module that each needs."""
OWN = (
    "kernels:flash_attention",
    "kernels:score_fp16",
    "kernels:score_bf16",
    "kernels:score_tf32",
    "kernels:score_e4m3",
    "kernels:score_e5m2",
    "kernels:flash_attention_e4m3",
    "kernels:flash_attention_e5m2",
    "kernels:flash_decode",
)


@dataclass(frozen=True, slots=True)
class Job:
    """One command.

    Attributes:
        name: ``kind/what``, a path under the run's folder without its ending.
        arguments: of this Python; ``{out}`` stands for the job's path, ``{folder}`` for the run's folder.
        limit: seconds until it is interrupted; a job may then take a while to write what it has.
        slots: cores that it keeps busy.
        on_cpu: it must not see a GPU.
        after: jobs that must have ended first, those of them that run at all.
        endless: goes on until it is interrupted, so that no job before it may be waiting when it starts.
    """

    name: str
    arguments: tuple[str, ...]
    limit: float
    slots: int = 1
    on_cpu: bool = False
    after: tuple[str, ...] = ()
    endless: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The first part of its name."""
        return self.name.partition("/")[0]

    def command(self, folder: Path) -> list[str]:
        """What to execute for a run in ``folder``."""
        out = str(folder / self.name)
        given = (a.replace("{out}", out).replace("{folder}", str(folder)) for a in self.arguments)
        return [sys.executable, *given]


def torch_names(device: str) -> tuple[str, ...]:
    """torch's back ends of ``scaled_dot_product_attention`` there."""
    middle = "cuda." if device == "cuda" else ""
    return tuple(f"torch.sdpa.{middle}{name}" for name in TORCH[device])


def others(device: str) -> tuple[str, ...]:
    """Further attentions: torch's, the tutorial's where its file is named, those of packages found here."""
    names = ("torch.flex.eager", "eager")
    if device != "cuda":
        return names
    tutorial = (TUTORIAL,) if "FLASHCHECK_TRITON_TUTORIAL" in os.environ else ()
    found = (name for name, module in PACKAGES.items() if importlib.util.find_spec(module) is not None)
    return (COMPILED, "torch.varlen", *names, *tutorial, *found)


def environment(kernel: str) -> dict[str, str]:
    """JAX is kept from the GPU in jobs that are not about it."""
    return {"JAX_PLATFORMS": "cuda,cpu"} if kernel.startswith("jax.cuda.") else {}


DTYPES = {
    "torch.sdpa.cuda.flash": ("fp16", "bf16"),
    "torch.sdpa.cuda.efficient": ("fp16", "bf16"),
    "torch.sdpa.cuda.cudnn": ("fp16", "bf16"),
    COMPILED: ("fp16", "bf16"),
    "torch.varlen": ("fp16", "bf16"),
    TUTORIAL: ("fp16",),
    "jax.cuda.cudnn": ("fp16", "bf16"),
    "jax.cuda.pallas": ("fp16", "bf16"),
    "flash_attn.4": ("fp16", "bf16"),
    "kernels:score_fp16": ("bf16", "fp32"),
    "kernels:score_bf16": ("fp16", "fp32"),
    "kernels:score_tf32": ("fp32",),
    "kernels:flash_attention_e4m3": ("e4m3",),
    "kernels:flash_attention_e5m2": ("e5m2",),
}
"""Declared dtypes, here so that jobs are listed without importing anything; a test compares them."""
ALL_DTYPES = ("fp16", "bf16", "fp32")
HELPERS = {OWN[0]: 2, COMPILED: 1, **dict.fromkeys(PACKAGES, 1)}
"""Kernels of a campaign that are compiled for every shape or option, and processes that do so ahead."""


def slug(name: str) -> str:
    """A kernel's name as a part of a path."""
    return name.replace(":", "-").replace("/", "-")


@dataclass(frozen=True, slots=True)
class Plan:
    """What jobs are made for.

    Attributes:
        device: cuda, or cpu for trying everything out.
        level: of the certificates.
        round: other rounds draw other problems.
        seconds: how long fuzz campaigns take.
        shards: processes that count false alarms on torch's kernels.
        certify_seconds: after which a certificate is written of what was judged; None: when all was.
    """

    device: str = "cuda"
    level: str = "standard"
    round: int = 0
    seconds: float = 240.0
    shards: int = 8
    certify_seconds: float | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        return (*torch_names(self.device), *others(self.device), *OWN)

    def seed(self, shard: int) -> int:
        """Of a shard of a run that is counted in problems."""
        return 70_000 + 1_000 * self.round + shard


def flashcheck(*arguments: str) -> tuple[str, ...]:
    return ("-m", "flashcheck", *arguments)


def probes(plan: Plan) -> Iterator[Job]:
    """The machine, measured; and one problem for each way of multiplying, so that `certify` finds its own
    short probe made when many start at once."""
    for kernel, what in ((torch_names(plan.device)[0], "torch"), (OWN[0], "triton")):
        asked = flashcheck("certify", kernel, "--max-cases", "1", "--dtype", "bf16", "--device", plan.device)
        yield Job(
            f"gate/{what}", (*asked, "--compile-ahead", "0", "--out", "{out}.json", "--quiet"), limit=90.0
        )
    yield Job("probe/full", flashcheck("probe", "--device", plan.device, "--json", "{out}.json"), limit=240.0)


GATES = ("gate/torch", "gate/triton")


def certificates(plan: Plan) -> Iterator[Job]:
    """One job for each kernel and dtype; those of a kernel are merged by ``tests.device.merge``."""
    slowest = (OWN[0], COMPILED, *PACKAGES)  # seconds of compilation for each problem
    limited = () if plan.certify_seconds is None else ("--max-time", f"{plan.certify_seconds:g}")
    for kernel in dict.fromkeys((*(k for k in slowest if k in plan.kernels), *plan.kernels)):
        for dtype in DTYPES.get(kernel, ALL_DTYPES):
            helpers = 2 if plan.device == "cuda" and kernel in slowest else 0
            yield Job(
                f"certificate/{slug(kernel)}.{dtype}",
                flashcheck(
                    *("certify", kernel, "--dtype", dtype, "--level", plan.level, "--device", plan.device),
                    *("--compile-ahead", str(helpers), *limited, "--out", "{out}.json", "--verbose"),
                ),
                limit=FILL,
                slots=1 + helpers,
                after=GATES,
                environment=environment(kernel),
            )


def edges(plan: Plan) -> Iterator[Job]:
    """A process for each kernel: an illegal access ends all that comes after it in its process."""
    for kernel in plan.kernels:
        asked = ("-m", "tests.report.edges", kernel, "--json", "{out}.json")
        yield Job(f"edges/{slug(kernel)}", asked, limit=240.0, environment=environment(kernel))


def soundness(plan: Plan) -> Iterator[Job]:
    """Each kind of kernel by itself, in several shards: those that are compiled are slow, and few."""
    groups: list[tuple[str, tuple[str, ...], int]] = [
        ("own", OWN[:1], 2),
        ("paths", OWN[1:], 2),
        ("torch", torch_names(plan.device), 2),
        ("eager", ("eager", "torch.flex.eager"), 1),
    ]
    if plan.device == "cuda":
        groups.append(("compiled", ("torch.varlen", COMPILED), 1))
    for name, kernels, shards in groups:
        for shard in range(shards):
            asked = ("-m", "tests.bounds.soundness", "--cases", "1000000", "--seed", str(plan.seed(shard)))
            command = (*asked, "--json", "{out}.json", "--kernels", *kernels)
            yield Job(f"soundness/{name}-{shard}", command, limit=FILL, endless=True)


def false_alarms(plan: Plan) -> Iterator[Job]:
    """Every check on kernels that are right; torch's own kernels need no compiler and carry most problems."""
    groups: list[tuple[str, tuple[str, ...], int]] = [
        ("torch", (*torch_names(plan.device), "eager"), plan.shards),
        ("flex", ("torch.flex.eager",), 1),
        ("own", OWN[:1], 1),
        ("paths", OWN[1:], 1),
    ]
    if plan.device == "cuda":
        groups.insert(2, ("compiled", ("torch.varlen", COMPILED), 1))
    for name, kernels, shards in groups:
        for shard in range(shards):
            yield _honest(f"honest/{name}-{shard}", kernels, plan.seed(shard), on_cpu=False)


def emulators(plan: Plan) -> Iterator[Job]:
    """Every check on the emulator's presets; needs no GPU."""
    from flashcheck import emulator

    for shard in range(4):
        name = f"honest-cpu/emulators-{shard}"
        yield _honest(name, tuple(emulator.KERNELS), plan.seed(shard), on_cpu=True)


def _honest(name: str, kernels: Sequence[str], seed: int, on_cpu: bool) -> Job:
    chosen = [part for kernel in kernels for part in ("--kernel", kernel)]
    asked = ("-m", "tests.checks.honest", "--cases", "1000000", "--seed", str(seed), "--json", "{out}.json")
    return Job(name, (*asked, *chosen), limit=FILL, on_cpu=on_cpu, endless=True)


def campaigns(plan: Plan) -> Iterator[Job]:
    """One fuzz campaign for each kernel, a worker each, two of the own kernel; where compiling is dear, some
    that compile ahead. ``rate`` measures what a machine can do that has nothing else to do."""
    on_gpu = plan.device == "cuda"
    for kernel in plan.kernels:
        if kernel == "torch.flex.eager" or kernel in OWN[1:]:
            continue
        workers = 2 if kernel == OWN[0] and on_gpu else 1
        helpers = HELPERS.get(kernel, 0) if on_gpu else 0
        asked = ("-m", "flashcheck.fuzz.measure", "campaign", kernel, "--device", plan.device)
        sizes = ("--seconds", f"{plan.seconds:g}", "--workers", str(workers), "--ahead", str(helpers))
        yield Job(
            f"fuzz/{slug(kernel)}",
            (*asked, *sizes, "--out", "{out}.json", "--seed", str(plan.round + 1)),
            limit=plan.seconds + 60.0,
            slots=workers + helpers,
            environment=environment(kernel),
        )


RATE_SECONDS = 20.0
RATE_WORKERS = 12
RATE_SIGNATURES = 6
"""Of a rate: seconds that are counted, workers on one GPU (that many cores), signatures of a kernel that is
compiled: beforehand, by as many processes."""


def rates(plan: Plan) -> Iterator[Job]:
    """Judged cases per second once compiled, lengths up to 512, of a dozen workers on one GPU: the forward's
    checks on every case, then the backward's; and of one worker. Each keeps all cores to itself: in the
    company of other jobs it would measure those."""
    kernels = ((torch_names(plan.device)[0], 0), (OWN[0], RATE_SIGNATURES))
    crowds = (RATE_WORKERS, 1) if plan.device == "cuda" else (2, 1)
    for workers, (kernel, signatures), passes in itertools.product(crowds, kernels, ("forward", "backward")):
        asked = ("-m", "flashcheck.fuzz.measure", "rate", kernel, "--device", plan.device)
        what = ("--passes", passes, "--workers", str(workers), "--signatures", str(signatures))
        more = ("--largest", "512", "--seconds", f"{RATE_SECONDS:g}", "--out", "{out}.json")
        yield Job(
            f"rate/{slug(kernel)}.{passes}.{workers}",
            (*asked, *what, *more, "--seed", str(plan.round + 1)),
            limit=200.0,
            slots=ALL_SLOTS,
        )


def costs(plan: Plan) -> Iterator[Job]:
    """Bounds and oracle on the CPU, where the judge works, and on the GPU: which is faster, at which size."""
    for device in dict.fromkeys(("cpu", plan.device)):
        asked = ("-m", "tests.bounds.cost", "--device", device, "--json", "{out}.json")
        yield Job(f"cost/{device}", asked, limit=180.0)


def own_kernels(_: Plan) -> Iterator[Job]:
    """What only a GPU shows of this repository's kernels; it starts a dozen processes."""
    yield Job("kernels/on-gpu", ("-m", "tests.kernels.on_gpu", "--json", "{out}.json"), limit=400.0, slots=12)


def mutants(_: Plan) -> Iterator[Job]:
    """Time until the fuzzer finds each seeded fault, from five seeds; needs no GPU."""
    for shard, names in enumerate(_faults(13)):
        asked = ("-m", "flashcheck.fuzz.measure", "mutants", *names, "--device", "cpu", "--seeds", "5")
        command = (*asked, "--seconds", "20", "--out", "{out}.json")
        yield Job(f"mutants/{shard:02}", command, limit=FILL, on_cpu=True)


def audits(_: Plan) -> Iterator[Job]:
    """The audit of the emulated faults at both levels and the rivals' rules; needs no GPU."""
    for shard, names in enumerate(_faults(13)):
        chosen = [part for name in names for part in ("--mutant", name)]
        command = flashcheck("audit", "--level", "quick", "--rivals", "--json", "{out}.json", *chosen)
        yield Job(f"audit/{shard:02}", command, limit=FILL, on_cpu=True)
    first = _faults(13)[0][0]
    command = flashcheck("audit", "--mutant", first, "--precision", "--json", "{out}.json")
    yield Job("audit/precision", command, limit=FILL, on_cpu=True)


def _faults(shards: int) -> list[list[str]]:
    """Names of the emulated faults, dealt out."""
    from flashcheck.mutants import MUTANTS

    return [list(MUTANTS)[n::shards] for n in range(shards)]


def findings(_: Plan) -> Iterator[Job]:
    """The repros of golden/findings, whose printed lines are their records; exit code 1: still so."""
    for path in sorted(Path("golden/findings").glob("*/repro.py")):
        yield Job(f"findings/{path.parent.name}", (str(path),), limit=180.0)


KINDS: dict[str, Callable[[Plan], Iterator[Job]]] = {
    "probe": probes,
    "certificate": certificates,
    "edges": edges,
    "soundness": soundness,
    "honest": false_alarms,
    "honest-cpu": emulators,
    "fuzz": campaigns,
    "rate": rates,
    "cost": costs,
    "kernels": own_kernels,
    "mutants": mutants,
    "audit": audits,
    "findings": findings,
}
"""What can be asked for; ``probe`` brings its gates along."""


def jobs_of(kinds: Sequence[str], plan: Plan) -> list[Job]:
    """All jobs of these kinds, in that order."""
    makers = [partial(KINDS[kind], plan) for kind in kinds]
    return [job for make in makers for job in make()]
