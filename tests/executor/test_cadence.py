"""How far apart snapshots lie where the job file leaves it open."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resihp.executor.snapshots.cadence import MOST_STEPS, SHARE, Cadence, Cost

STEP = Cost(busy_s=1.0, waited_s=2.0)
NEW = 2
"""Snapshots into memory that was not used before: one for each slot."""


def known(*snapshots: Cost, step: Cost = STEP) -> Cadence:
    cadence = Cadence()
    for snapshot in [Cost(9.0, 9.0)] * NEW + list(snapshots):
        cadence.add(snapshot, step)
    return cadence


def test_before_any_cost_is_known_every_version_is_kept():
    """The first into new memory say nothing of those to come."""
    assert Cadence().gap == known().gap == 1


def test_what_costs_next_to_nothing_is_done_after_every_step():
    """As in most training, whose steps are long beside a copy."""
    assert known(Cost(SHARE, 0.0)).gap == 1


def test_in_the_mean_snapshots_cost_no_more_than_their_share():
    """A copy of two per cent of a step, one step in eight."""
    assert known(Cost(0.02, 0.0)).gap == 8


def test_a_vote_that_waits_for_its_snapshot_counts_by_the_clock():
    """Such as for a buddy beyond a slow link, which keeps no processor busy."""
    assert known(Cost(0.0, 0.04)).gap == 8


def test_one_that_others_disturbed_does_not_count():
    """The least of the last ones."""
    assert known(Cost(0.5, 0.0), Cost(0.01, 0.0), Cost(0.3, 0.0)).gap == 4


def test_what_was_long_ago_does_not_count_either():
    """Steps may have become shorter."""
    assert known(Cost(SHARE, 0.0), *[Cost(0.01, 0.0)] * 5).gap == 4


def test_another_layout_begins_anew():
    """Its snapshots have another size, and new memory."""
    cadence = known(Cost(0.02, 0.0))
    cadence.begin()
    assert cadence.gap == 1
    for _ in range(NEW):
        cadence.add(Cost(0.02, 0.0), STEP)
    assert cadence.gap == 1
    cadence.add(Cost(0.01, 0.0), STEP)
    assert cadence.gap == 4


@given(
    st.floats(0, 1e6, allow_nan=False),
    st.floats(0, 1e6, allow_nan=False),
    st.floats(0, 1e3, allow_nan=False),
)
def test_a_gap_is_a_number_of_steps_whatever_clocks_say(
    busy_s: float, waited_s: float, step: float
):
    """Also of a step in which a coarse clock did not move."""
    assert 1 <= known(Cost(busy_s, waited_s), step=Cost(step, step)).gap <= MOST_STEPS
