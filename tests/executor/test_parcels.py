"""Parcels: every element travels once, in order, and no message is larger than allowed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from resihp.executor.parcels import parcels_of

SHAPES = st.lists(st.lists(st.integers(1, 6), min_size=0, max_size=3), min_size=1, max_size=4)


@given(SHAPES, st.integers(1, 3), st.integers(1, 40))
def test_parcels_carry_every_element_once_and_in_order(
    shapes: list[list[int]], num_kinds: int, max_elements: int
):
    """Tensor by tensor, of each all its kinds; what does not fit is cut."""
    named = [(f"t{number}", tuple(shape)) for number, shape in enumerate(shapes)]
    tensors: dict[tuple[str, int], torch.Tensor] = {}
    begin = 0
    for name, shape in named:
        for kind in range(num_kinds):
            size = int(torch.empty(shape).numel())
            tensors[name, kind] = torch.arange(begin, begin + size).view(shape)
            begin += size
    carried: list[int] = []
    for parcel in parcels_of(named, num_kinds, max_elements):
        found = [tensors[name, kind][where].reshape(-1) for name, kind, where, _ in parcel.blocks]
        assert [block.num_elements for block in parcel.blocks] == [len(each) for each in found]
        assert 0 < parcel.num_elements <= max_elements
        carried += torch.cat(found).tolist()
    assert carried == list(range(begin))


def test_a_large_table_needs_few_parcels():
    """Its rows are put together up to the limit."""
    sizes = [parcel.num_elements for parcel in parcels_of([("table", (1000, 7))], 3, 700)]
    assert sizes == [700] * 30


def test_small_tensors_travel_together():
    """A layer of a small model is one message."""
    (parcel,) = parcels_of([("a", (3,)), ("b", (2, 2))], 3, 21)
    assert parcel.num_elements == 21
