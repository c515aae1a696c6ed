"""The shortest circle of waits, against all of them."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from resihp.ir.circle import shortest_circle

WAITS = st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 5), max_size=3), max_size=6)


@given(WAITS)
def test_it_is_a_circle_and_none_is_shorter(waits):
    """Beside every order of every subset of those who wait."""
    found = shortest_circle(waits)
    lengths = [
        size
        for size in range(1, 7)
        for order in permutations(waits, size)
        if all(b in waits[a] for a, b in zip(order, (*order[1:], order[0]), strict=True))
    ]
    assert len(found) == min(lengths, default=0)
    for here, there in zip(found, [*found[1:], *found[:1]], strict=True):
        assert there in waits[here]
