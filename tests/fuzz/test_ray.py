"""A campaign on a cluster of several nodes, one of which dies in the middle: nothing lost, nothing twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flashcheck.fuzz.campaign import Budget, State
from flashcheck.fuzz.store import Store
from flashcheck.fuzz.totals import totals_of

pytestmark = pytest.mark.ray


def test_a_node_dies_and_nothing_is_lost_or_counted_twice(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="pip install 'flashcheck[ray]'")
    from ray.cluster_utils import Cluster

    from flashcheck.fuzz.distributed import RayCampaign

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    doomed = cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1)
    store = Store(tmp_path)
    store.open("tests.fuzz.subjects:honest", 1, resume=False)
    campaign = RayCampaign(
        "tests.fuzz.subjects:honest",
        "cpu",
        store,
        1,
        Budget(cases=24),
        address=cluster.address,
        shard_cases=8,
    )
    killed = False
    submitted: list[int] = []
    submit = campaign._submit

    def counting(work: Any, shard: Any) -> Any:
        submitted.append(shard.number)
        return submit(work, shard)

    def kill_a_node(state: State) -> None:
        nonlocal killed
        if not killed and state.cases:  # both nodes have started; one holds a shard that is under way
            cluster.remove_node(doomed, allow_graceful=False)
            killed = True

    campaign._submit = counting  # type: ignore[method-assign]
    try:
        state = campaign.run(kill_a_node)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert killed
    lines = list(store.case_lines())
    assert max(Counter((line["shard"], line["n"]) for line in lines).values()) == 1
    assert totals_of(lines).total == state.cases == len(lines)
    done = {line["shard"] for line in lines}
    assert done == set(submitted), "a shard of the dead node was lost"
    assert len(lines) == 24
    files = sorted(p.name for p in (tmp_path / "cases").iterdir())
    assert files == [f"shard-{number:06d}.jsonl" for number in sorted(done)]


def test_a_shard_is_counted_once(tmp_path: Path) -> None:
    from flashcheck.fuzz.distributed import ShardResult, write_shard

    result = ShardResult(3, [{"dtype": "bf16", "seconds": {}, "shard": 3, "n": 1}], [])
    assert write_shard(Store(tmp_path), result)
    assert not write_shard(Store(tmp_path), result)
    assert totals_of(Store(tmp_path).case_lines()).total == 1
