"""A coordinator that takes over: what it proposes, what it adopts, and what it closes."""

from __future__ import annotations

import msgspec
import pytest
from coordinator_cases import CachedPlanner, Desk, exited, job_of, ready, record_of, settled

from resihp.config import RejoinConfig
from resihp.monitor.actions import Log, PlanMade, StepCommitted
from resihp.monitor.coordinator import Phase
from resihp.monitor.incident import Incident
from resihp.monitor.memory import Memory
from resihp.wire.address import Address
from resihp.wire.messages import (
    Beat,
    Close,
    Deploy,
    ExecutorStarted,
    Fence,
    Finished,
    Go,
    Joined,
    Resend,
    Sealed,
    StepDone,
    StoreAt,
    StoreOpened,
)
from resihp.wire.timing import Timing


def runs(generation: int = 1, *, is_running: bool = True) -> Beat:
    return Beat(step=0, instruction=0, generation=generation, runs=is_running)


def joined(generation: int = 1, digest: str = "x") -> Joined:
    return Joined(generation=generation, hashes={"layer 0": digest}, moved_bytes=0)


# --- deciding


def test_nothing_is_deployed_before_it_is_decided():
    """The entry says all that a successor needs; the plan is kept once it is decided."""
    desk = Desk()
    desk.bring_to(Phase.PROPOSING)
    (entry,) = desk.proposed()
    assert not desk.sent(Deploy)
    assert not desk.all_of(PlanMade)
    desk.decide(1)
    assert desk.phase is Phase.OPENING
    assert desk.last_deploy().plan == entry.plan
    assert (entry.generation, entry.base, entry.alive) == (1, 0, tuple(desk.world))


def test_a_plan_that_is_decided_too_late_is_not_deployed():
    """A rank was lost meanwhile; the generation after it has a plan of its own."""
    desk = Desk()
    desk.bring_to(Phase.PROPOSING)
    desk.say(3, exited())
    desk.decide(1)
    assert not desk.sent(Deploy)
    desk.settle()
    assert [entry.generation for entry in desk.proposed()] == [1, 2]
    assert 3 in desk.proposed()[-1].lost
    desk.decide(2)
    assert desk.last_deploy().generation == 2


def test_a_plan_that_no_quorum_writes_down_ends_the_job():
    """After its time, with what the monitors say of their disks."""
    desk = Desk()
    desk.bring_to(Phase.PROPOSING)
    desk.coordinator.journal_refused(0, "node 0 has no vote: no room")
    bound_s = Timing.from_detect_within(job_of().job.detect_within_s).decide_s
    desk.wait(bound_s / 2)
    assert desk.end is None
    desk.wait(bound_s)
    assert desk.end is not None
    assert desk.end.exit_code == 1
    assert "generation 1 is undecided after" in desk.end.reason
    assert "node 0 has no vote: no room" in desk.end.reason
    assert not desk.sent(Deploy)


# --- adopting


def test_a_generation_that_all_run_goes_on_untouched():
    """Nobody is told to leave or to go; only what ranks said last is asked for again."""
    desk = Desk()
    desk.take_over(desk.entry(3, base=2, version=1))
    assert desk.sent(Resend) == [(rank, Resend(from_step=1)) for rank in desk.world]
    desk.say_all(runs(3))
    assert desk.phase is Phase.RUNNING
    assert not desk.sent(Close) + desk.sent(Go)
    desk.step(1)
    assert [action.record.step for action in desk.all_of(StepCommitted)] == [1]


def test_who_waits_in_an_adopted_generation_is_told_to_go():
    """The coordinator before died while it said so."""
    desk = Desk()
    desk.take_over(desk.entry())
    desk.say(0, joined())
    desk.say(1, joined())
    desk.say(0, runs(is_running=False))
    desk.say(1, runs(is_running=False))
    desk.say(2, runs())
    assert desk.phase is Phase.RESUMING
    desk.say(3, runs())
    assert desk.phase is Phase.RUNNING
    assert [rank for rank, _ in desk.sent(Go)] == [0, 1]


@pytest.mark.parametrize(
    "odd", [runs(2), runs(4), runs(is_running=False)], ids=["older", "newer", "left"]
)
def test_a_generation_that_one_rank_does_not_run_is_closed(odd: Beat):
    """For one that nobody was told of yet."""
    desk = Desk()
    desk.take_over(desk.entry(3, base=2))
    for rank in desk.world[:-1]:
        desk.say(rank, runs(3))
    desk.say(desk.world[-1], odd)
    assert desk.phase is Phase.SETTLING
    assert desk.closed() == list(desk.world)
    assert desk.generation >= max(4, odd.generation)


def test_who_is_started_again_without_a_place_waits_for_one():
    """It had one in the layout before, of which nothing is taken: no plan is deployed to it."""
    job = msgspec.structs.replace(job_of(), rejoin=RejoinConfig(restarts=3))
    desk, planner = Desk(job), CachedPlanner(job)
    without = planner.after_loss(planner.initial(), [3], 1).text
    entry = desk.entry(3, base=2, version=1)
    desk.take_over(msgspec.structs.replace(entry, plan=without, alive=(0, 1, 2), lost=(3,)))
    for rank in (3, 0, 1, 2):
        if rank != 3:
            desk.say(rank, exited())
        desk.say(rank, ExecutorStarted(pid=10 + rank))
        desk.say(rank, ready())
    for rank in desk.world:
        own = Sealed(rank=rank, generation=2 if rank == 3 else 3, version=1, updates=1)
        said = settled(desk.generation, layouts=(0,))
        desk.say(rank, msgspec.structs.replace(said, snapshots=(own,)))
    assert desk.last_deploy().base == 3
    assert desk.coordinator.returned == {3}


def test_an_executor_that_was_started_again_before_is_not_killed_for_it():
    """Whoever led before knew of its loss, but no plan without it was decided: it is back."""
    for base in (0, 2):
        desk = Desk()
        desk.take_over(desk.entry(base + 1, base=base))
        desk.say_all(ready())
        for rank in desk.world:
            desk.say(rank, runs(base + 1, is_running=False))
        for rank in desk.world:
            fresh = rank == 3
            layouts = (0,) if fresh else (base + 1,)
            desk.say(rank, settled(desk.generation, 0 if fresh else 2, layouts=layouts))
        assert not desk.sent(Fence)
        assert desk.coordinator.returned == {3}
        assert desk.last_deploy().base == base + 1


def test_replicas_that_joined_differently_are_not_adopted():
    """All joined and nobody runs: the check before go is still to be made."""
    desk = Desk()
    desk.take_over(desk.entry())
    for rank in desk.world:
        desk.say(rank, joined(digest=str(rank)))
        desk.say(rank, runs(is_running=False))
    assert desk.phase is Phase.SETTLING


def test_a_generation_is_closed_where_a_rank_is_not_heard():
    """Or where one is lost: then as after any loss."""
    for how in ("silent", "lost"):
        desk = Desk()
        desk.take_over(desk.entry())
        for rank in desk.world[:-1]:
            desk.say(rank, runs())
        if how == "lost":
            desk.say(3, exited())
        else:
            desk.wait(desk.timing.silent_s + 1, beats=None)
        assert desk.phase is Phase.SETTLING


def test_the_store_is_told_again_to_those_who_still_join():
    """What the coordinator before passed on may not have arrived."""
    desk = Desk()
    desk.take_over(desk.entry())
    desk.say(0, StoreOpened(generation=1, address=Address("127.0.0.1", 7)))
    assert [rank for rank, _ in desk.sent(StoreAt)] == list(desk.world)


# --- settling after a takeover


@pytest.mark.parametrize(
    ("layouts", "base"), [((2, 3), 2), ((2,), 2), ((3,), 3)], ids=["joined", "not yet", "gone"]
)
def test_survivors_go_on_from_a_layout_that_all_hold(layouts: tuple[int, ...], base: int):
    """The coordinator before may have let the generation go, and its word may have arrived."""
    desk = Desk()
    desk.take_over(desk.entry(3, base=2))
    desk.say_all(ready())
    desk.say(3, exited())
    for rank in desk.alive:
        both = (2, 3) if rank and base == 2 else layouts
        desk.say(rank, settled(desk.generation, layouts=both))
    assert desk.last_deploy().base == base


def test_a_layout_that_all_have_left_is_not_gone_back_to_for_its_snapshots():
    """They are in memory still, and that of a rank that is lost is not: the newer one is whole."""
    desk = Desk()
    desk.take_over(desk.entry(3, base=2, version=1))
    desk.say_all(ready())
    desk.say(3, exited())
    for rank in desk.alive:
        own = [
            Sealed(rank=rank, generation=generation, version=1, updates=1) for generation in (2, 3)
        ]
        lost = Sealed(rank=3, generation=3, version=1, updates=1)
        held = settled(desk.generation, 1, layouts=(3,))
        desk.say(rank, msgspec.structs.replace(held, snapshots=(*own, lost)))
    assert desk.last_deploy().base == 3


@pytest.mark.parametrize("base", [2, 3])
def test_where_all_were_started_again_the_layout_with_all_its_snapshots_is_taken(base: int):
    """Of the other one a rank has none."""
    desk = Desk()
    desk.take_over(desk.entry(3, base=2, version=1))
    desk.say_all(ready())
    other = 5 - base
    desk.say(3, msgspec.structs.replace(runs(3, is_running=False), generation=4))
    for rank in desk.alive:
        kept = [
            Sealed(rank=rank, generation=generation, version=1, updates=1)
            for generation in (2, 3)
            if generation != other or rank
        ]
        nothing = settled(desk.generation, layouts=(0,))
        desk.say(rank, msgspec.structs.replace(nothing, snapshots=tuple(kept)))
    assert desk.last_deploy().base == base


def test_who_was_started_again_while_another_one_led_is_not_fenced_for_it():
    """It has nothing, like any rank that is back; the others go on without its shards."""
    desk = Desk()
    desk.take_over(desk.entry(3, base=2, version=1))
    desk.say_all(ready())
    desk.say(0, runs(3))
    desk.say(1, runs(3))
    desk.say(2, runs(3))
    desk.say(3, runs(0, is_running=False))
    for rank in desk.alive:
        desk.say(rank, settled(desk.generation, 1, layouts=(0,) if rank == 3 else (3,)))
    assert not desk.sent(Fence)
    assert desk.alive == [0, 1, 2]
    assert desk.last_deploy().base == 3


def test_nobody_is_deployed_to_before_it_said_where_it_is_reached():
    """A new coordinator does not know that; ranks say it again."""
    desk = Desk()
    desk.take_over(desk.entry())
    desk.say(3, exited())
    desk.settle()
    assert not desk.proposed()
    desk.say_all(ready())
    assert desk.phase is Phase.OPENING


def test_steps_that_another_coordinator_saw_leave_a_gap_and_nothing_else():
    """They are committed on all ranks, and counted; nobody reports them twice."""
    desk = Desk()
    desk.take_over(desk.entry())
    desk.say_all(runs())
    desk.step(2)
    assert not desk.all_of(StepCommitted)  # the steps before it may be on their way
    desk.say(3, exited())
    desk.say_all(ready())
    desk.settle(3)
    assert [action.record.step for action in desk.all_of(StepCommitted)] == [2]
    assert [record.step for record in desk.coordinator.records] == [0, 1, 2]
    assert desk.last_deploy().commit.version == 3


def test_a_job_that_was_finished_while_nobody_led_ends():
    """All ranks say so again."""
    desk = Desk()
    desk.take_over(desk.entry())
    desk.say_all(StepDone(generation=1, record=record_of(3)))
    desk.say_all(Finished(generation=1))
    assert desk.end is not None
    assert (desk.end.exit_code, desk.end.reason) == (0, "finished")


def test_a_takeover_is_told_in_the_events():
    """With the generation, and whether it was adopted."""
    desk = Desk()
    desk.take_over(desk.entry())
    desk.say_all(runs())
    kinds = [action.kind for action in desk.all_of(Log)]
    assert kinds == ["resumed", "adopted"]


def test_a_loss_that_was_told_is_not_told_again():
    """Nobody decided on a plan without it: it is lost once more, to one incident and event."""
    desk = Desk()
    incident = Incident(ranks=[3], evidence="gone", detected_s=1.0, step=1)
    desk.coordinator.remember(Memory([incident], num_plans=1, told_lost={3}))
    desk.take_over(desk.entry(version=1))
    desk.say(3, exited())
    assert desk.phase is Phase.SETTLING
    assert desk.coordinator.incidents == [incident]
    assert incident.ranks == [3]
    assert not [log for log in desk.all_of(Log) if log.kind == "rank_lost"]
    desk.say(2, exited())
    assert incident.ranks == [3, 2]
