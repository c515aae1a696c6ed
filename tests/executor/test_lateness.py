"""How late beats are, in figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.executor import lateness
from resihp.executor.lateness import Lateness


@given(st.lists(st.floats(0.0, 10.0), min_size=1), st.floats(0.0, 1.0))
def test_a_quantile_leaves_at_most_its_share_above(delays, share):
    """And is one of the delays."""
    late = Lateness()
    for delay in delays:
        late.add(delay)
    found = late.quantile_s(share)
    assert found in delays
    assert sum(delay > found for delay in delays) <= (1 - share) * len(delays)
    assert late.quantile_s(1.0) == max(delays)


def test_only_the_newest_are_kept(monkeypatch):
    """A rank may beat for months."""
    monkeypatch.setattr(lateness, "_KEPT", 3)
    late = Lateness()
    for delay in (9.0, 1.0, 2.0, 3.0):
        late.add(delay)
    assert late.quantile_s(1.0) == 3.0
    assert str(late).startswith("4 beats while computing, late by 2000.00 ms in the median")


def test_without_beats_nothing_was_late():
    """A job that ended at once."""
    assert Lateness().quantile_s(0.99) == pytest.approx(0.0)
