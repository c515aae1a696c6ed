"""Checksums that add up over shards, and parcels that carry one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resihp.executor.checksum import opened_parcel, sealed_parcel, shard_sum
from resihp.executor.layouts import TensorLayout, cuts_evenly, local_shard, num_copies, shard_units


def slow_sum(whole: torch.Tensor) -> int:
    """By the definition, element by element."""
    bits = whole.reshape(-1).view(torch.int32).tolist()
    total = sum((b & 0xFFFFFFFF) * (i + 1) for i, b in enumerate(bits)) % 2**64
    return total - 2**64 if total >= 2**63 else total


def sum_of_shards(layout: TensorLayout, whole: torch.Tensor, degree: int) -> int:
    """Copies count once."""
    total = torch.zeros((), dtype=torch.int64)
    for index in range(0, degree, num_copies(layout, degree)):
        start, _ = shard_units(layout.units, degree, index)
        assert layout.dim is not None
        length = layout.shape[layout.dim] // layout.units
        shard = local_shard(layout, whole, degree, index)
        total += shard_sum(shard, layout, start * length)
    return int(total)


@given(
    st.integers(0, 1), st.integers(1, 6), st.integers(1, 3), st.integers(1, 9), st.integers(0, 99)
)
def test_sums_of_shards_add_up_in_every_layout(
    dim: int, units: int, length: int, other: int, seed: int
):
    """[T15] Rows or columns, uneven runs, copies: the same sum at every TP degree."""
    shape = (units * length, other) if dim == 0 else (other, units * length)
    layout = TensorLayout(shape, dim, units)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    expected = slow_sum(whole)
    assert int(shard_sum(whole, layout, 0)) == expected
    for degree in (1, 2, 4, 8):
        if cuts_evenly(layout, degree):
            assert sum_of_shards(layout, whole, degree) == expected


@pytest.mark.parametrize("shape", [(70_001,), (3, 70_001), (70_001, 3), (500, 300)])
def test_tensors_larger_than_a_piece_are_summed_alike(shape: tuple[int, ...]):
    """Whether rows are longer than a piece or many fit into one."""
    whole = torch.randn(shape)
    cut = TensorLayout(shape, 0, 1)
    assert int(shard_sum(whole, cut, 0)) == slow_sum(whole)
    assert int(shard_sum(whole, TensorLayout(shape, None, 1), 0)) == slow_sum(whole)


@given(st.integers(0, 11), st.integers(0, 31))
def test_one_changed_bit_changes_the_sum(place: int, bit: int):
    """Also that of a sign or of the last place."""
    layout = TensorLayout((3, 4), 0, 3)
    whole = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    before = int(shard_sum(whole, layout, 0))
    whole.view(-1).view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
    assert int(shard_sum(whole, layout, 0)) != before


def test_a_parcel_says_whether_it_came_as_it_was_sent():
    """Whatever its numbers are; NaN has bits too."""
    parts = [torch.randn(5), torch.tensor([float("nan"), -0.0]), torch.empty(0)]
    flat = sealed_parcel(parts)
    opened = opened_parcel(flat)
    assert opened is not None
    assert torch.equal(opened.view(torch.int32), torch.cat(parts).view(torch.int32))
    for place in range(len(flat)):
        changed = flat.clone()
        changed.view(torch.int32)[place] ^= 1
        assert opened_parcel(changed) is None
    assert opened_parcel(flat[[1, 0, *range(2, len(flat))]]) is None
