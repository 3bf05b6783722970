"""The tiling of a kernel is read off the bits of its output."""

import datetime
from dataclasses import replace

import pytest

from flashcheck import emulator
from flashcheck.arithmetic import ARITHMETICS, HOPPER, IEEE
from flashcheck.bounds.identify import CANDIDATES, WHOLE, Tiling, TilingTally, can_identify
from flashcheck.certify import certify
from flashcheck.checks import Judged
from flashcheck.formats import format_named
from flashcheck.inputs.spec import ProblemSpec
from flashcheck.loading import load
from flashcheck.mutants.exposing import draw
from flashcheck.plan import Case, Plan
from flashcheck.report.build import certificate_of


def tally_of(kernel, arithmetic, problems):
    tally = TilingTally()
    for problem in problems:
        judged = Judged(kernel, problem)
        assert can_identify(arithmetic(problem))
        tally.add(problem, judged.exact, judged.result.out, arithmetic(problem), judged.rules.machine)
    return tally


@pytest.mark.parametrize("machine", [IEEE, HOPPER], ids=lambda m: m.name)
@pytest.mark.parametrize(
    ("preset", "block", "order"),
    [
        ("flash.bf16", 32, "ascending"),
        ("flash.bf16", 64, "descending"),
        ("flash.fp16", 64, "ascending"),
        ("flash.fp16", 128, "descending"),
    ],
)
def test_the_emulators_tiling_is_found(preset, block, order, machine):
    plain = ARITHMETICS[preset]
    kernel = emulator.as_kernel(replace(plain, block_keys=block, order=order), machine, name="x")
    fmt = format_named(plain.input_format.name)
    problem = draw(fmt, heads=(1, 1), lengths=(64, 300), dims=(32, 32), scale=0.5)
    tally = tally_of(kernel, lambda _: plain, [problem])
    assert Tiling(block, order) in tally.explained
    assert all(candidate.order == order for candidate in tally.explained)
    if preset == "flash.bf16":  # 11 bits leave the maxima of few tiles visible
        assert tally.explained == (Tiling(block, order),)
        assert f"{block} keys, {order} explains all" in tally.describe()


def test_torch_cpu_flash_is_found_to_visit_tiles_of_512():
    """Its exponential errs by 2^-13 at every rescaling, which hides tilings of many tiles: only those of few
    tiles can be told apart."""
    kernel = load("torch.sdpa.flash")
    problem = draw(format_named("bf16"), heads=(1, 1), lengths=(64, 700), dims=(32, 32), scale=0.5)
    declared = kernel.arithmetic(problem)
    unknown = replace(declared, block_keys=None, order="unknown")
    tally = tally_of(kernel, lambda _: unknown, [problem])
    assert Tiling(512, "ascending") in tally.explained
    assert not {Tiling(512, "descending"), WHOLE} & set(tally.explained)


def test_one_tile_tells_nothing_apart():
    plain = ARITHMETICS["flash.bf16"]
    kernel = emulator.as_kernel(plain, name="x")
    tally = tally_of(kernel, lambda _: plain, [draw(lengths=(8, 16))])
    assert tally.explained == CANDIDATES
    assert "every candidate" in tally.describe()


def test_another_algorithm_is_explained_by_none():
    plain = ARITHMETICS["flash.bf16"]
    kernel = emulator.as_kernel(replace(plain, row_sum="rounded"), name="x")
    problem = draw(heads=(1, 1), lengths=(64, 300), dims=(32, 32))
    twice = replace(kernel, forward=lambda p: replace(kernel.forward(p), out=kernel.forward(p).out * 1.01))
    tally = tally_of(twice, lambda _: plain, [problem])
    assert tally.explained == ()
    assert "no candidate explains" in tally.describe()


def test_what_cannot_be_identified_is_known():
    assert not can_identify(ARITHMETICS["eager.bf16"])
    assert not can_identify(ARITHMETICS["flash.fp32"])
    assert not can_identify(replace(ARITHMETICS["flash.bf16"], block_keys=64, order="ascending"))


def test_a_certificate_says_which_tiling_explains_the_bits():
    """A kernel that declares no tiling; two problems, both long enough."""
    plain = ARITHMETICS["flash.bf16"]
    kernel = emulator.as_kernel(replace(plain, block_keys=32, order="descending"), name="x")
    kernel = replace(kernel, arithmetic=lambda _: plain)
    specs = [ProblemSpec(dtype="bf16", num_queries=32, num_keys=200, scale=0.5, seed=s) for s in range(2)]
    cases = tuple(Case(spec, ("forward.bound",)) for spec in specs)
    outcome = certify(kernel, Plan("quick", 0, ("bf16",), cases, {}))
    assert outcome.tilings["bf16"].explained == (Tiling(32, "descending"),)
    certificate = certificate_of(kernel, outcome, "cpu", "x", datetime.datetime.now(datetime.UTC))
    assert "32 keys, descending explains all" in certificate.tilings["bf16"]


def test_what_is_told_of_a_tally_names_the_fewer_candidates():
    one, two = CANDIDATES[0], CANDIDATES[3]
    tally = TilingTally(elements=1000, problems=1)
    assert tally.describe() == "every candidate explains all 1,000 elements"
    tally.outside.update({one: 7, two: 5})
    assert tally.describe() == (
        f"every candidate but {one.describe()} and {two.describe()} explains all 1,000 elements; "
        "these miss 5 or more"
    )
    tally.outside.update({c: 9 for c in CANDIDATES if c not in (one, two)})
    del tally.outside[two]
    assert tally.describe() == (
        f"{two.describe()} explains all 1,000 elements; the other candidates miss 7 or more"
    )
    tally.outside[two] = 3
    assert tally.describe().startswith(
        f"no candidate explains the bits; {two.describe()} comes closest, 3 of"
    )
