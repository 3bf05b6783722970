"""What only a GPU can show, in one run: `python -m tests.kernels.on_gpu --json FILE`.

Every launch configuration on exact problems and poisoned memory; 100 repeats, bit by bit; the casts to
fp8 against the rounding in the fp32 domain, over all fp32 numbers; the published outlier test. Without a GPU
it runs small, in the interpreter. Exits with 1 where anything is wrong.
"""

import argparse
import concurrent.futures.process
import contextlib
import datetime
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

PARTS = ("casts", "precision", "repeats", "sinks", "pipelined", "exactness", "judged")
EXACT = ("sinks", "pipelined", "exactness", "judged")
LOST = "not finished: it took too long, or its process ended"
SECONDS = 90
"""What one configuration may take, compilation included."""
LIMITS = {"processes": 12}
"""Most of the time goes into compiling, so that parts run side by side, each in a process of its own."""


def side_by_side(task, arguments, device):
    """Results of ``task(argument, device)`` in order; an exception becomes its text.

    A process that ends takes all others of its pool with it; what they had not finished runs again, each in a
    pool of its own.
    """
    if device.type != "cuda":
        return [attempt(task, argument, device) for argument in arguments]
    results = together(task, arguments, device, LIMITS["processes"])
    lost = [i for i, result in enumerate(results) if result == LOST]
    with concurrent.futures.ThreadPoolExecutor(LIMITS["processes"]) as threads:
        again = threads.map(lambda i: together(task, [arguments[i]], device, 1)[0], lost)
        for i, result in zip(lost, again, strict=True):
            results[i] = result
    return results


def together(task, arguments, device, processes):
    """Results in order; ``LOST`` where a process of the pool ended."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        running = [pool.submit(attempt, task, argument, device) for argument in arguments]
        return [outcome(future) for future in running]


def outcome(future):
    try:
        return future.result()
    except concurrent.futures.process.BrokenProcessPool:
        return LOST


def attempt(task, argument, device):
    # After an illegal access every later call of the same process fails too; the first one is the fault.
    try:
        return task(argument, device)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


@contextlib.contextmanager
def limited(seconds):
    """A kernel that never ends ends this process, not the whole run."""
    timer = threading.Timer(seconds, os._exit, (3,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def named(found, only="", without=""):
    """Those whose text holds any of the comma-separated words ``only`` and none of ``without``."""
    only, without = (words.split(",") if words else [] for words in (only, without))
    chosen = [x for x in found if not only or any(word in str(x) for word in only)]
    return [x for x in chosen if not any(word in str(x) for word in without)]


def chosen(found, only="", without=""):
    """The same, and an error where none is left: nothing that was run must not pass."""
    left = named(found, only, without)
    if not left:
        raise ValueError(f"--only is {only!r}, --without {without!r}: nothing is left to run")
    return left


def exact_one(configuration, device):
    from tests.kernels.exactness import faults

    with limited(SECONDS):
        return faults(configuration, device)


def exactness(device, only="", without="", sweep=False):
    """Configuration -> what is not exact; a configuration that does not compile or run is wrong too.

    ``only``, ``without``: as in `named`; ``sweep``: the tuning sweep's candidates too.
    """
    from tests.kernels.exactness import configurations, distinct_blocks, sweep_configurations

    found = dict.fromkeys([*configurations(), *(sweep_configurations() if sweep else [])])
    found = chosen(found, only, without)
    found = found if device.type == "cuda" else distinct_blocks(found)[:2]
    results = zip(found, side_by_side(exact_one, found, device), strict=True)
    return {"configurations": len(found), "wrong": {str(c): result for c, result in results if result}}


def sink_one(case, device):
    from tests.kernels.sinks import sink_faults

    with limited(SECONDS):
        return sink_faults(case, device)


def sinks(device):
    """Sinks beside scores of any size."""
    from tests.kernels.sinks import PATHS as PRODUCTS
    from tests.kernels.sinks import SIZES

    cases = [(*path, size) for path in PRODUCTS for size in SIZES]
    results = zip(cases, side_by_side(sink_one, cases, device), strict=True)
    return {"cases": len(cases), "wrong": {str(case): result for case, result in results if result}}


def repeat_one(arguments, device):
    import kernels
    from tests.kernels.attention import inputs, make

    d, count = arguments
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "nq": 1000, "nk": 4200}
    size = size if device.type == "cuda" else {**size, "batch": 1, "nq": 20, "nk": 40}
    q, k, v = inputs(device, torch.bfloat16, d=d, **size)
    options = {"causal": "bottom_right"}
    # The first batch as two segments, long enough on a GPU for the forward in Gluon.
    packed = [x[:1] for x in (q, k, v)]
    packing = {
        f"cu_seqlens_{side}": torch.tensor([0, size[f"n{side}"] // 3, size[f"n{side}"]], device=device)
        for side in ("q", "k")
    } | options
    dout = make(q.shape, q.dtype, 9, device)
    first, differ = None, set()
    for _ in range(count):
        out, lse = kernels.forward(q, k, v, **options)
        found = {"out": out, "lse": lse, **kernels.backward(dout, q, k, v, out, lse, **options)}
        out, lse = kernels.forward(*packed, **packing)
        again = {"out": out, "lse": lse, **kernels.backward(dout[:1], *packed, out, lse, **packing)}
        found |= {f"packed {name}": x for name, x in again.items()}
        found["e4m3"] = kernels.forward(q, k, v, score="e4m3", hadamard=True)[0]
        found["decode"] = kernels.flash_decode(q[:, :, :1], k, v)
        first = first or found
        differ |= {f"{n} d {d}" for n, x in found.items() if not torch.equal(x, first[n])}
    return sorted(differ)


def repeats(device, count):
    """Names of results that differ between repeats of one call."""
    dims = (32, 64, 96, 128, 192, 256) if device.type == "cuda" else (16,)
    results = side_by_side(repeat_one, [(d, count) for d in dims], device)
    return {"calls": count * len(dims), "differ": [result for result in results if result]}


def casts(device):
    """Format -> fp32 numbers that the machine's cast and the rounding in the fp32 domain turn into others."""
    from kernels import interpreter
    from tests.kernels.rounding_probe import cast, rounded

    interpreter.repair()
    step = 2**26 if device.type == "cuda" else 2**14
    stop = 2**32 if device.type == "cuda" else 2**15
    found = {}
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        wrong = 0
        for start in range(0, stop, step):
            bits = torch.arange(start, start + step, device=device, dtype=torch.int64).to(torch.int32)
            x = bits.view(torch.float32)
            a, b = cast(x, dtype).float(), rounded(x, name)
            wrong += int(((a != b) & ~(a.isnan() & b.isnan())).sum())
        found[name] = wrong
    return {"numbers": stop, "differ": found}


def pipelined_one(case, device):
    from tests.kernels.pipelined_bits import differences

    with limited(SECONDS):
        return differences(case, device)


def pipelined(device, only="", without=""):
    """Calls in which the forward in Gluon gives other bits than the one in Triton; nothing without a GPU."""
    from tests.kernels.pipelined_bits import CASES

    cases = chosen(CASES, only, without) if device.type == "cuda" else []
    results = zip(cases, side_by_side(pipelined_one, cases, device), strict=True)
    return {"cases": len(cases), "wrong": {str(case): result for case, result in results if result}}


def judged_one(case, device):
    from tests.kernels.judged import rejections

    torch.set_num_threads(1)  # as many processes as cores judge
    with limited(2 * SECONDS):
        return rejections(case, device)


def judged(device, only="", without=""):
    """Long calls through the checks, as users make them."""
    from tests.kernels.judged import CASES, SHORT

    cases = chosen(CASES, only, without) if device.type == "cuda" else [SHORT]
    results = zip(cases, side_by_side(judged_one, cases, device), strict=True)
    return {"cases": len(cases), "wrong": {str(case): result for case, result in results if result}}


def outliers_one(arguments, device):
    from tests.kernels.precision import outlier_rms

    path, sizes = arguments
    return outlier_rms(device, **sizes, **path)


def precision(device):
    """The outlier test for each score path, with the published numbers."""
    from tests.kernels.precision import PATHS, PUBLISHED

    gpu = device.type == "cuda"
    sizes = {"num_queries": 1024, "num_keys": 4096, "heads": 32} if gpu else {"heads": 1, "num_keys": 64}
    paths = PATHS[: None if gpu else 1]
    results = side_by_side(outliers_one, [(path, sizes) for path in paths], device)
    rows = [{"path": path, "rms": rms} for path, rms in zip(paths, results, strict=True)]
    for row in rows:
        rotated = row["path"]["score"] != "e4m3" or row["path"].get("hadamard")
        row["published"] = PUBLISHED.get(row["path"]["score"]) if rotated else None
    return {"head_dim": 128, **sizes, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--repeats", type=int, default=100, help="calls that must agree bit by bit")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument(
        "--only", default="", help="exactness, pipelined, judged: only what holds any of these words"
    )
    parser.add_argument("--without", default="", help="the same: only what holds none of these")
    parser.add_argument(
        "--processes", type=int, default=LIMITS["processes"], help="at once; default %(default)s"
    )
    parser.add_argument("--sweep", action="store_true", help="exactness: candidates of the sweep too")
    arguments = parser.parse_args()
    wanted = arguments.parts.split(",")
    if not set(wanted) <= set(PARTS):
        parser.error(f"--parts is {arguments.parts}; it must be of {', '.join(PARTS)}")
    if arguments.processes < 1:
        parser.error(f"--processes is {arguments.processes}; it must be 1 at least")
    LIMITS["processes"] = arguments.processes
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    import triton

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "ptxas": os.environ.get("TRITON_PTXAS_PATH", "Triton's own"),
    }
    count = arguments.repeats if device.type == "cuda" else min(arguments.repeats, 2)
    parts = {
        "casts": lambda: casts(device),
        "precision": lambda: precision(device),
        "repeats": lambda: repeats(device, count),
        "sinks": lambda: sinks(device),
        "pipelined": lambda: pipelined(device, arguments.only, arguments.without),
        "exactness": lambda: exactness(device, arguments.only, arguments.without, arguments.sweep),
        "judged": lambda: judged(device, arguments.only, arguments.without),
    }
    for name in wanted:
        part = parts[name]
        started = time.perf_counter()
        try:
            report[name] = part()
        except Exception as error:
            report[name] = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        report[name]["seconds"] = round(time.perf_counter() - started, 1)
        print(f"{name}: {json.dumps(report[name])}", flush=True)
        write(arguments.json, report)  # after each part: a kill loses one part
    sys.exit(0 if good(report) else 1)


def good(report):
    """Nothing failed, nothing differs, nothing is less precise than published."""
    parts = {name: report[name] for name in PARTS if name in report}
    if any("failed" in part for part in parts.values()):
        return False
    rows = parts.get("precision", {}).get("rows", [])
    ran = all(isinstance(row["rms"], float) for row in rows)
    precise = ran and all(row["published"] is None or row["rms"] <= row["published"] for row in rows)
    same = not any(parts.get("casts", {}).get("differ", {}).values())
    same = same and not parts.get("repeats", {}).get("differ")
    exact = not any(parts.get(name, {}).get("wrong") for name in EXACT)
    return precise and same and exact


def write(path, report):
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(report, file, indent=1)
    Path(file.name).replace(path)


if __name__ == "__main__":
    main()
