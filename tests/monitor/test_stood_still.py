"""Processes that stood still, with their machine say, and blame nobody else for it."""

from __future__ import annotations

import pytest
from coordinator_cases import SECRET, CachedPlanner, Desk, exited, job_of, ready, record_of

from resihp.monitor.actions import End, Evict, Log, Send, StepCommitted
from resihp.monitor.coordinator import Coordinator, Phase
from resihp.monitor.helm import Helm, Order
from resihp.monitor.node.roster import Roster
from resihp.monitor.quorum.leadership import Leadership
from resihp.monitor.quorum.outcomes import ToNode
from resihp.wire.messages import Beat, Request, Resend, StepDone
from resihp.wire.quorum import Accepted, Lead, Promise
from resihp.wire.timing import Timing

TIMING = Timing.from_detect_within(1.0)
SLEPT_S = 1000.0
RUNS = Beat(step=0, instruction=0, generation=3, runs=True)


class Ship:
    """A helm on one node; `lead` takes it from one that ran generation 3."""

    def __init__(self) -> None:
        job = job_of()
        self.timing = Timing.from_detect_within(job.job.detect_within_s)
        coordinator = Coordinator(job, CachedPlanner(job), SECRET, 0.0)
        lead = Leadership((0,), 0, "x", 5, self.timing, 0.0)
        self.helm = Helm(coordinator, lead, {0: range(coordinator.world)}, lambda _: [])
        self.entry = Desk().entry(3, base=2, version=1)

    def lead(self) -> Helm:
        self.helm.connected(0, 0.0)
        for is_probe in (True, False):
            promise = Promise(term=5, entry=self.entry, is_probe=is_probe)
            self.helm.answer(0, promise, 0.0)
        self.helm.answer(0, Accepted(term=5, generation=3), 0.0)
        self.helm.beat(0, 1, dict.fromkeys(range(4), RUNS), 0.0)
        assert self.helm.coordinator.phase is Phase.RUNNING
        return self.helm


def confirm(helm: Helm, orders: list[Order], now_s: float) -> list[Order]:
    """Its monitor answers what it asks."""
    (question,) = (each.message for each in orders if isinstance(each, ToNode))
    assert isinstance(question, Lead)
    promise = Promise(term=question.term, entry=None, number=question.number)
    return helm.answer(0, promise, now_s)


def acts(orders: list[Order]) -> list[Order]:
    return [order for order in orders if not isinstance(order, ToNode)]


def test_a_coordinator_that_stood_still_hears_what_waited_only_when_it_is_said_again():
    """Its steps may be told by another one that leads; ranks are asked for them once it is sure."""
    helm = Ship().lead()
    done = StepDone(generation=3, record=record_of(1))
    orders = helm.from_rank(0, done, SLEPT_S)
    assert not acts(orders)
    assert not acts(helm.tick(SLEPT_S))
    assert not helm.beat(0, 7, {1: RUNS}, SLEPT_S)
    orders = confirm(helm, orders, SLEPT_S)
    assert [each.rank for each in orders if isinstance(each, Send)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert Send(2, Resend(from_step=1)) in orders
    orders = helm.from_rank(0, done, SLEPT_S)
    assert [each.record.step for each in orders if isinstance(each, StepCommitted)] == [1]


@pytest.mark.parametrize("kind", ["gone", "stop", "wish"])
def test_what_monitors_say_only_once_is_kept_until_it_is_sure(kind: str):
    """Who is gone, what an operator wants, and that the job is to end."""
    helm = Ship().lead()
    if kind == "gone":
        orders = helm.rank_gone(2, SLEPT_S, "its supervisor fell", 3.0)
    elif kind == "wish":
        orders = helm.wish("audit", SLEPT_S)
    else:
        orders = helm.stop("stopped by SIGTERM", 143, SLEPT_S)
    assert not acts(orders)
    assert not helm.from_rank(2, ready(), SLEPT_S)
    orders = confirm(helm, orders, SLEPT_S)
    if kind == "gone":
        (lost,) = (each for each in orders if isinstance(each, Log) and each.kind == "rank_lost")
        assert (lost.fields["rank"], lost.fields["evidence"]) == (2, "its supervisor fell")
    elif kind == "wish":
        assert Send(0, Request(generation=3, what="audit")) in orders
    else:
        assert [each.exit_code for each in orders if isinstance(each, End)] == [143]


@pytest.mark.parametrize(
    "phase", [each for each in Phase if each not in (Phase.SAVING, Phase.STOPPING)]
)
def test_no_rank_is_late_by_what_the_coordinator_slept(phase: Phase):
    """Nobody is evicted, no phase is over its time, nothing is called a hang."""
    desk = Desk()
    desk.bring_to(phase)
    desk.clock.advance(SLEPT_S)
    desk.do(desk.coordinator.stood_still(SLEPT_S, desk.clock.now_s()))
    desk.wait(0.1)
    assert desk.phase is phase
    assert desk.end is None
    assert not desk.all_of(Evict)


def test_after_it_woke_the_coordinator_waits_as_long_as_ever():
    """A rank that does not settle is fenced in the end."""
    desk = Desk().run()
    desk.say(3, exited())
    desk.clock.advance(SLEPT_S)
    desk.do(desk.coordinator.stood_still(SLEPT_S, desk.clock.now_s()))
    desk.wait(desk.timing.stalled_s + 1)
    kinds = [log.kind for log in desk.all_of(Log)]
    assert "stood_still" in kinds
    assert "fence" in kinds


def test_a_monitor_that_stood_still_kills_no_supervisor_for_it():
    """Silent, or late to come back to it; from then on they have as long as ever."""
    ranks = Roster(range(2), TIMING, 0.0, was_restarted=True)
    ranks.connected(0, 0.0)
    ranks.tick(0.2)
    ranks.tick(SLEPT_S)
    assert ranks.to_kill([], SLEPT_S) == {}
    assert ranks.missed(SLEPT_S) == []
    late_s = SLEPT_S + TIMING.silent_s + 0.1
    assert ranks.to_kill([], late_s).keys() == {0}
    assert ranks.missed(late_s) == [1]
