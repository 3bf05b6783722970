"""Launches of every kernel on small ragged problems, to run under compute-sanitizer; prints what it ran.

    compute-sanitizer --tool memcheck  --error-exitcode 1 python -m tests.kernels.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.kernels.sanitize

Each configuration of the table, each option, a paged decode; ``--few`` takes one configuration a kernel and
format, ``--only`` and ``--without`` choose by words, as in on_gpu.py; ``--compile`` only fills the cache of
compiled kernels, several processes at once: to be run before, where time is short. Without a GPU it runs in
the interpreter, which shows that the script works and nothing else.
"""

import argparse
import os
import sys
import time

# The caching allocator would hide accesses past a tensor's end inside its own blocks.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

OPTIONS = ("band", "mask", "bias", "alibi and sink", "packed", "key lengths", "e4m3", "paged decode")


def chosen(few, only, without, device):
    """Configurations to launch; ``few``: the largest head dim up to 128 of each kernel and format."""
    from tests.kernels.exactness import configurations, distinct_blocks
    from tests.kernels.on_gpu import named

    found = named(configurations(), only, without)
    if few:
        largest = {}
        for c in sorted((c for c in found if c.head_dim <= 128), key=lambda c: c.head_dim):
            largest[c.kernel, c.dtype, c.score] = c
        wide = (torch.float16, torch.float8_e5m2)  # the same code as bf16 and e4m3, but for a conversion
        found = [c for c in largest.values() if c.dtype not in wide]
        found.sort(key=lambda c: ("pipelined" not in c.kernel, "hopper" not in c.kernel, c.kernel))
    return found if device.type == "cuda" else distinct_blocks(found)[:3]


def launch(work, device):
    """One configuration, or the calls of one option; what there is to say about it."""
    from tests.kernels.exactness import Configuration, faults

    if isinstance(work, Configuration):
        return "; ".join(faults(work, device, num_queries=70, num_keys=140)) or "exact"
    call(work, device)
    return "ran"


def call(option, device):
    import kernels
    from tests.kernels.attention import inputs, make

    q, k, v = inputs(device, torch.bfloat16, batch=1, heads=4, kv_heads=2, nq=37, nk=75, d=40, dv=24)
    if option == "paged decode":
        table = torch.tensor([[2, 0, 1]], device=device)
        pages = [make((3, 2, 16, n), torch.bfloat16, n, device) for n in (40, 24)]
        lengths = torch.tensor([39], device=device)
        kernels.flash_decode(q[:, :, :2], *pages, block_table=table, key_lengths=lengths, num_splits=3)
        return
    ends_q, ends_k = (torch.tensor(x, device=device) for x in ([0, 20, 37], [0, 40, 75]))
    options = {
        "band": {"causal": "bottom_right", "window": (20, None)},
        "mask": {"mask": torch.rand(1, 1, 37, 75, device=device) < 0.7},
        "bias": {"bias": make((1, 4, 1, 75), torch.bfloat16, 1, device), "softcap": 4.0},
        "alibi and sink": {
            "alibi_slopes": torch.ones(4, device=device),
            "sink": torch.zeros(4, device=device),
        },
        "packed": {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k},
        "key lengths": {"key_lengths": torch.tensor([50], device=device)},
        "e4m3": {"score": "e4m3", "score_scales": "rows", "hadamard": True},
    }[option]
    out, lse = kernels.forward(q, k, v, **options)
    kernels.backward(make(out.shape, out.dtype, 3, device), q, k, v, out, lse, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--few", action="store_true", help="one configuration a kernel and format")
    parser.add_argument("--only", default="", help="only what holds any of these words (A,B,...)")
    parser.add_argument("--without", default="", help="only what holds none of these words")
    parser.add_argument("--compile", action="store_true", help="fill the cache, several processes at once")
    parser.add_argument("--processes", type=int, default=12, help="with --compile; default %(default)s")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after so long")
    arguments = parser.parse_args()
    start = time.monotonic()
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.on_gpu import LIMITS, named, side_by_side

    LIMITS["processes"] = arguments.processes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    only, without = arguments.only, arguments.without
    works = [*chosen(arguments.few, only, without, device), *named(OPTIONS, only, without)]
    if not works:
        parser.error(f"--only is {only!r}, --without {without!r}: nothing is left to launch")
    if arguments.compile:
        results = side_by_side(launch, works, device)
        sys.stdout.write("".join(f"{w}: {r}\n" for w, r in zip(works, results, strict=True)))
        return
    for i, work in enumerate(works):
        if time.monotonic() - start > arguments.seconds:
            print(f"out of time: {len(works) - i} of {len(works)} not run", flush=True)
            break
        print(f"{work}: {launch(work, device)}", flush=True)


if __name__ == "__main__":
    main()
