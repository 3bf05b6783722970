"""Where compiling is dear, shards keep to few signatures and still reach everything."""

from __future__ import annotations

import random

from flashcheck.fuzz.case import FuzzCase
from flashcheck.fuzz.hunter import CaseEvent
from flashcheck.fuzz.judge import CaseReport
from flashcheck.fuzz.schedule import Scheduler
from flashcheck.fuzz.signature import ALWAYS, OPTIONS_AT_ONCE, Focus, derived, draw_focus, samples
from flashcheck.fuzz.totals import LineWriter
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.mutants.registry import CAPABILITIES


def _line(shard: int, gain: int, seconds: float) -> dict[str, object]:
    return {"shard": shard, "dtype": "x", "covered": list(range(gain)), "seconds": {"judge": seconds}}


def test_every_dtype_once_then_by_yield() -> None:
    scheduler = Scheduler(("fp16", "bf16", "fp32"), CAPABILITIES)
    first = [scheduler.choose(n) for n in range(3)]
    assert {f.dtype for f in first} == {"fp16", "bf16", "fp32"}
    rich = first[1]
    for n, focus in enumerate(first):
        scheduler.saw(_line(n, 50 if focus is rich else 1, 1.0))
    later = []
    for n in range(3, 33):
        later.append(scheduler.choose(n))
        scheduler.saw(_line(n, 50 if later[-1] == rich else 1, 1.0))
    counts = {f: later.count(f) for f in first}
    assert counts[rich] == max(counts.values())
    assert min(counts.values()) > 0  # nothing is given up for good


def test_compiled_kernels_meet_few_signatures_a_shard_and_all_in_the_end() -> None:
    for seed in range(20):
        focus = draw_focus(random.Random(seed), CAPABILITIES, ("bf16",))
        assert focus.options is not None
        assert len(focus.options) <= OPTIONS_AT_ONCE
        narrow = focus.narrowed(CAPABILITIES)
        assert set(narrow.options) <= {*ALWAYS, *focus.options}
        specs = samples(focus, CAPABILITIES, True, seed)
        assert len({derived(s, True) for s in specs}) == len(specs) <= 40
        assert all(narrow.head_dim[0] <= s.head_dim <= narrow.head_dim[1] for s in specs)
        assert all(CAPABILITIES.refuses(s.outline()) is None for s in specs)
    scheduler = Scheduler(("fp16", "bf16"), CAPABILITIES, compiled=True, seed=1)
    foci = []
    for n in range(200):
        foci.append(scheduler.choose(n))
        scheduler.saw(_line(n, 1, 1.0))
    assert len(set(foci)) <= 21  # about sqrt(2 * 200)
    assert {f.dtype for f in foci} == {"fp16", "bf16"}
    assert set(CAPABILITIES.options) - set(ALWAYS) <= {o for f in foci for o in f.options or ()}
    assert Focus("bf16").narrowed(CAPABILITIES) is CAPABILITIES


def test_the_first_call_of_a_signature_is_compile_time() -> None:
    writer = LineWriter()
    spec = ProblemSpec(dtype="bf16")
    report = CaseReport(seconds={"build": 0.0, "first": 2.0, "kernel": 0.5, "judge": 1.0})
    event = CaseEvent(0, 1, FuzzCase(spec, ()), report, None)
    first, second = (writer.line(event, derived(spec, False))["seconds"] for _ in range(2))
    assert (first["compile"], first["kernel"]) == (2.0, 0.5)
    assert second["kernel"] == 2.5
    assert "compile" not in second
    assert "compile" not in LineWriter().line(event)["seconds"]  # nothing is compiled there
    assert derived(spec, False) != derived(ProblemSpec(dtype="bf16", head_dim=17), False)
    assert derived(spec, False) == derived(
        ProblemSpec(dtype="bf16", head_dim=9, num_keys=77, scale=2.0), False
    )
