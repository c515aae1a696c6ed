"""Which window trains when: every window once per epoch, from the step's number alone."""

from __future__ import annotations

import pytest
from cases import dataset_of
from hypothesis import given
from hypothesis import strategies as st

from resihp.executor.packing import IGNORED_TARGET, Packing
from resihp.executor.sampler import GlobalBatches, Sampler


@given(st.integers(1, 50), st.integers(0, 5), st.integers(0, 3))
def test_every_window_is_used_once_per_epoch(num_windows, seed, epoch):
    """[T19] No window is left out or repeated, in any epoch."""
    sampler = Sampler(num_windows, seed)
    positions = range(epoch * num_windows, (epoch + 1) * num_windows)
    assert sorted(map(sampler.sample_id, positions)) == list(range(num_windows))


def test_epochs_and_seeds_have_their_own_order():
    """Fixed for each, different between them."""

    def order(seed: int, epoch: int) -> list[int]:
        return [Sampler(40, seed).sample_id(epoch * 40 + i) for i in range(40)]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.fixture
def packing(tmp_path):
    return Packing(dataset_of(tmp_path, [bytes([65 + i]) * (5 + i) for i in range(20)]), 16, seed=0)


@pytest.mark.parametrize("num_steps", [30])
def test_steps_go_through_the_epochs_without_gap_or_repeat(packing, num_steps):
    """[T19] A global batch that does not divide the epoch carries on into the next one."""
    batches = GlobalBatches(packing, Sampler(packing.num_windows, 0), 2, 3)
    assert packing.num_windows % 6 != 0
    used = [
        batches.sample_id(step, home, mb)
        for step in range(num_steps)
        for home in range(2)
        for mb in range(3)
    ]
    for start in range(0, len(used) - packing.num_windows + 1, packing.num_windows):
        epoch = used[start : start + packing.num_windows]
        assert sorted(epoch) == list(range(packing.num_windows))


def test_a_sample_depends_on_its_place_only(packing):
    """Any rank, asked in any order, gives the same window: a redone step has the same data."""
    first = GlobalBatches(packing, Sampler(packing.num_windows, 0), 2, 3)
    again = GlobalBatches(packing, Sampler(packing.num_windows, 0), 2, 3)
    places = [(step, home, mb) for step in (7, 0, 3) for home in (1, 0) for mb in (2, 0, 1)]
    assert [first.sample_id(*p) for p in places] == [again.sample_id(*p) for p in places]
    assert first.micro_batch(7, 1, 2).input_ids_T.equal(again.micro_batch(7, 1, 2).input_ids_T)


@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 40))
def test_many_positions_are_looked_up_as_one_by_one(num_windows, first, count):
    """Over the ends of any number of epochs."""
    sampler = Sampler(num_windows, 3)
    expected = [sampler.sample_id(position) for position in range(first, first + count)]
    assert sampler.sample_ids(first, count).tolist() == expected


def test_targets_of_a_step_are_counted_without_building_it(packing):
    """The count equals that of all micro-batches, built."""
    batches = GlobalBatches(packing, Sampler(packing.num_windows, 0), 2, 3)
    for step in range(5):
        built = [batches.micro_batch(step, home, mb) for home in range(2) for mb in range(3)]
        counted = sum(int((batch.targets_T != IGNORED_TARGET).sum()) for batch in built)
        assert batches.num_targets(step) == counted
