"""Who runs whose micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resihp.compiler import spread_work


@given(st.data(), st.integers(1, 6), st.integers(1, 7))
def test_work_is_spread_evenly_and_completely(data, num_replicas, num_microbatches):
    """Every micro-batch of every home runs once, own ones first, loads differ by at most one."""
    left = sorted(data.draw(st.sets(st.integers(0, num_replicas - 1), min_size=1)))
    work = spread_work(left, num_replicas, num_microbatches)
    assert sorted(work) == left
    everything = sorted(item for items in work.values() for item in items)
    assert everything == [(h, n) for h in range(num_replicas) for n in range(num_microbatches)]
    loads = [len(items) for items in work.values()]
    assert max(loads) - min(loads) <= 1
    for replica, items in work.items():
        assert items[:num_microbatches] == [(replica, n) for n in range(num_microbatches)]
        assert items[num_microbatches:] == sorted(items[num_microbatches:])
