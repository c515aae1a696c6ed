"""How often a lost rank is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resihp.monitor.restarts import Restarts


def test_the_first_start_is_at_once_and_later_ones_wait_longer_each_time():
    """So that a rank that dies at once does not keep the machine busy."""
    restarts, now_s, pauses = Restarts(4, 5.0), 0.0, list[float]()
    while restarts.plan(3, now_s):
        waited_s = 0.0
        while not restarts.due(now_s + waited_s):
            waited_s += 1.0
        pauses.append(waited_s)
        now_s += waited_s
    assert pauses == [0, 5, 10, 20]


def test_the_budget_counts_progress_not_attempts():
    """[T10] A step that the rank took part in gives all of it back; without one it is used up."""
    restarts = Restarts(3, 1.0)
    for _ in range(50):
        assert restarts.plan(1, 0.0)
        assert restarts.due(0.0) == [1]
        restarts.took_part([0, 1])
    for _ in range(3):
        assert restarts.plan(1, 0.0)
        assert restarts.due(1e9) == [1]
    assert not restarts.plan(1, 1e9)
    assert restarts.due(1e9) == []


def test_a_rank_without_a_supervisor_is_not_due():
    restarts = Restarts(3, 1.0)
    assert restarts.plan(1, 0.0)
    restarts.forget(1)
    assert restarts.due(1e9) == []


def test_starts_by_others_count_too():
    """A launcher that starts supervisors again uses the same budget."""
    restarts = Restarts(2, 1.0)
    assert [restarts.started(1) for _ in range(3)] == [True, True, False]
    assert not restarts.plan(1, 0.0)


def test_what_was_started_by_others_is_not_started_once_more():
    """The order would end an executor that is as good as a new one."""
    restarts = Restarts(3, 1.0)
    restarts.plan(1, 0.0)
    restarts.due(0.0)
    restarts.plan(1, 0.0)
    restarts.started(1)
    assert not restarts.planned
    assert restarts.due(1000.0) == []


@given(st.lists(st.sampled_from(["lost", "step", "gone"]), max_size=60), st.integers(0, 4))
def test_no_more_than_the_budget_between_two_steps(events: list[str], most: int):
    """Whatever happens in between."""
    restarts, now_s, since_step = Restarts(most, 1.0), 0.0, 0
    for event in events:
        now_s += 1000.0
        since_step += len(restarts.due(now_s))
        if event == "lost":
            restarts.plan(0, now_s)
        elif event == "step":
            restarts.took_part([0])
            since_step = 0
        else:
            restarts.forget(0)
        assert since_step <= most
