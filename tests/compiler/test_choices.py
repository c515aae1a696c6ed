"""TP groups and layer partitions: against all other choices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from resihp.compiler.partition import StageTime, partition, ranges_of
from resihp.compiler.spares import Demand, Wanting, share_out
from resihp.ir.model import Group, LayerRange

speeds = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.9, 1.0]), min_size=1, max_size=8)


def alone(values: Sequence[float], k_min: int = 1) -> Demand | None:
    """What a group of devices of such speeds becomes without spare ones."""
    ranks = tuple(range(len(values)))
    group = Group(replica=0, pp=0, ranks=ranks, layers=(LayerRange(0, 0),))
    own = tuple(rank for rank in ranks if values[rank] > 0)
    demands = share_out([Wanting(group, own, k_min)], (), 8, values.__getitem__)
    return None if demands is None else demands[group.name]


def test_a_badly_slow_device_is_left_out():
    """Four devices, one at a fifth: two healthy ones do more than four at its pace."""
    assert alone([1.0, 0.2, 1.0, 1.0]) == Demand(degree=2, speed=1.0, num_spares=0)


def test_a_mildly_slow_device_stays():
    """At 0.8 four devices still do more than two."""
    assert alone([1.0, 0.8, 1.0, 1.0]) == Demand(degree=4, speed=0.8, num_spares=0)


def test_of_equal_throughputs_the_larger_degree_is_taken():
    """At half speed four devices do as much as two: more of them keep what they hold."""
    assert alone([1.0, 0.5, 1.0, 1.0]) == Demand(degree=4, speed=0.5, num_spares=0)


def test_the_least_degree_that_memory_allows_is_kept():
    """Though two devices would be faster, each would need too much memory."""
    assert alone([1.0, 0.1, 1.0, 1.0], k_min=4) == Demand(degree=4, speed=0.1, num_spares=0)


def test_too_few_devices_form_no_group():
    """Three of four lost, two needed."""
    assert alone([0.0, 0.0, 1.0, 0.0], k_min=2) is None


@given(speeds, st.sampled_from([1, 2, 4]))
def test_no_set_of_devices_does_more(values, k_min):
    """Eq. 4 over every subset of a feasible size."""
    best = alone(values, k_min)
    alive = [rank for rank, speed in enumerate(values) if speed > 0]
    everything = [
        degree * min(values[rank] for rank in chosen)
        for degree in (1, 2, 4, 8)
        if k_min <= degree <= len(alive)
        for chosen in combinations(alive, degree)
    ]
    if not everything:
        assert best is None
    else:
        assert best is not None
        assert best.degree * best.speed == max(everything)


def test_the_paper_s_example_of_figure_5():
    """A stage at 2/5 of the speed: (4, 4, 4) becomes (5, 2, 5)."""
    stages = [StageTime(1.0, 0.0, 12), StageTime(2.5, 0.0, 12), StageTime(1.0, 0.0, 12)]
    assert partition(stages, 12, [4, 4, 4]) == [5, 2, 5]


stage_times = st.builds(
    StageTime,
    st.sampled_from([0.5, 1.0, 1.5, 2.0, 7.0]),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.integers(0, 7),
)


@given(st.lists(stage_times, min_size=1, max_size=4), st.integers(1, 10), st.data())
def test_no_partition_has_a_faster_slowest_stage(stages, num_layers, data):
    """Against all partitions, memory included."""
    whole = [
        counts
        for counts in product(range(1, num_layers + 1), repeat=len(stages))
        if sum(counts) == num_layers
    ]
    current = data.draw(st.sampled_from(whole)) if whole else [1] * len(stages)
    found = partition(stages, num_layers, current)
    possible = [
        counts
        for counts in whole
        if all(n <= s.most_layers for n, s in zip(counts, stages, strict=True))
    ]

    def slowest(counts: tuple[int, ...] | list[int]) -> float:
        return max(stage.of(count) for stage, count in zip(stages, counts, strict=True))

    if not possible:
        assert found is None
    else:
        assert found is not None
        assert tuple(found) in possible
        assert slowest(found) == min(map(slowest, possible))


def test_a_partition_that_is_best_already_stays():
    """Nothing moves where nothing would get faster."""
    stages = [StageTime(1.0, 0.0, 99)] * 3
    assert partition(stages, 10, [3, 4, 3]) == [3, 4, 3]
    assert partition(stages, 10, [4, 3, 3]) == [4, 3, 3]


def test_the_head_counts_on_the_last_stage():
    """Worth two layers, it gets two layers less."""
    stages = [StageTime(1.0, 0.0, 99), StageTime(1.0, 2.0, 99)]
    assert partition(stages, 10, [5, 5]) == [6, 4]


def test_ranges_follow_each_other():
    """From counts to layers."""
    assert ranges_of([2, 1, 3]) == [LayerRange(0, 1), LayerRange(2, 2), LayerRange(3, 5)]
