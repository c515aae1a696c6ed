"""Which supervisors of a node are there, gone, silent or missed."""

from __future__ import annotations

from resihp.monitor.node.roster import Roster
from resihp.wire.messages import Beat
from resihp.wire.timing import Timing

TIMING = Timing.from_detect_within(1.0)
BEAT = Beat(step=3, instruction=1)


def roster(*, was_restarted: bool = False) -> Roster:
    return Roster(range(2), TIMING, 0.0, was_restarted=was_restarted)


def test_a_beat_is_passed_on_once():
    """The newest of each rank since the last time."""
    ranks = roster()
    ranks.connected(0, 0.0)
    ranks.heard(0, 0.1, Beat(step=2, instruction=0))
    ranks.heard(0, 0.2, BEAT)
    assert ranks.take_beats() == {0: BEAT}
    assert ranks.take_beats() == {}


def test_a_rank_that_comes_back_is_not_gone():
    """Its connection broke, and another one of it is there."""
    ranks = roster()
    ranks.connected(1, 0.0)
    ranks.disconnected(1, "its supervisor is gone")
    assert ranks.gone == {1: "its supervisor is gone"}
    ranks.connected(1, 1.0)
    assert ranks.gone == {}
    assert ranks.here == {1}


def test_after_a_restart_of_the_monitor_ranks_are_missed_once():
    """Who knew the monitor before must come back within `silent_s`."""
    ranks = roster(was_restarted=True)
    ranks.connected(0, 0.1)
    assert ranks.missed(TIMING.silent_s - 0.1) == []
    assert ranks.missed(TIMING.silent_s) == [1]
    assert ranks.missed(TIMING.silent_s + 1) == []
    assert ranks.gone == {1: "its supervisor did not come back"}


def test_at_the_start_nobody_is_missed():
    """Starting takes as long as it takes; the coordinator has a bound for it."""
    assert roster().missed(1e9) == []


def test_a_silent_supervisor_is_to_be_killed():
    """Whatever it says counts as a sign of life."""
    ranks = roster()
    ranks.connected(0, 0.0)
    ranks.connected(1, 0.0)
    ranks.heard(1, TIMING.silent_s)
    assert ranks.to_kill([], TIMING.silent_s) == {}
    assert ranks.to_kill([], TIMING.silent_s + 0.1).keys() == {0}


def test_a_stopped_supervisor_is_to_be_killed_sooner():
    """Once the kernel has shown it so at three looks in a row, be they early or late."""
    ranks = roster()
    ranks.connected(0, 0.0)
    looks = [(number + late) * TIMING.beat_s for number, late in enumerate((0, 0, 0, 0.3, 0))]
    assert ranks.to_kill([0], looks[0]) == {}
    assert ranks.to_kill([], looks[1]) == {}
    assert ranks.to_kill([0], looks[2]) == {}
    assert ranks.to_kill([0], looks[3]) == {}
    assert ranks.to_kill([0], looks[4]).keys() == {0}
