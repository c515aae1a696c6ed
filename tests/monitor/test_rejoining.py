"""Lost ranks come back: started again, waited for, and given a place between two steps."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest
from coordinator_cases import Desk, exited, job_of, ready, record_of, settled

from resihp.config import RejoinConfig, StateConfig
from resihp.ir.expand import expand
from resihp.ir.model import Op
from resihp.ir.parser import parse
from resihp.monitor.actions import Log, PlanMade, Say, Send
from resihp.monitor.coordinator import Phase
from resihp.wire.messages import (
    AskWhere,
    At,
    Beat,
    Close,
    Deploy,
    ExecutorExited,
    ExecutorStarted,
    Fence,
    Hello,
    Pause,
    Request,
    Resend,
    Respawn,
    Sealed,
    Stop,
    Trouble,
)

GOOD = 3
BEAT = Beat(step=0, instruction=0)


def desk_of(restarts: int = 3, steps: int = 100, tp: int = 1, pp: int = 2, dp: int = 2) -> Desk:
    """A stage of one replica is gone with any rank, so the plan grows as soon as it may."""
    rejoin = RejoinConfig(restarts=restarts, good_iterations=GOOD)
    return Desk(msgspec.structs.replace(job_of(tp, pp, dp, steps=steps), rejoin=rejoin)).run()


def logged(desk: Desk, kind: str) -> list[Log]:
    return [log for log in desk.all_of(Log) if log.kind == kind]


PIDS = count(1)


def started() -> ExecutorStarted:
    """Of an executor that was never seen before."""
    return ExecutorStarted(pid=next(PIDS))


def lose(desk: Desk, rank: int) -> None:
    """Its executor dies, and the others run on without it."""
    steps = len(desk.coordinator.records)
    desk.say(rank, exited())
    desk.settle(steps)
    desk.join()
    assert desk.phase is Phase.RUNNING


def return_(desk: Desk, rank: int, digest: str = "d") -> None:
    """Its new executor is started and gets ready."""
    desk.say(rank, started())
    desk.say(rank, ready(digest))


def run_steps(desk: Desk, num: int) -> None:
    for _ in range(num):
        desk.step(len(desk.coordinator.records))


def grow(desk: Desk) -> None:
    """From a request to yield to the larger plan."""
    desk.settle_next(len(desk.coordinator.records))
    desk.join()


def yields(desk: Desk) -> list[tuple[int, Request]]:
    return desk.sent(Request)


def test_a_lost_executor_is_started_again_by_its_supervisor():
    desk = desk_of()
    lose(desk, 3)
    assert [rank for rank, _ in desk.sent(Respawn)] == [3]


@pytest.mark.parametrize("snapshot_every", ["auto", 0])
def test_all_holders_lost_before_anything_was_trained_are_waited_for(snapshot_every: Any):
    """Nothing is lost but time: they begin as they would have, also without snapshots."""
    state = StateConfig(snapshot_every=snapshot_every)
    job = msgspec.structs.replace(job_of(2, 1, 2), state=state, rejoin=RejoinConfig())
    desk = Desk(job)
    desk.bring_to(Phase.OPENING)
    for rank in (1, 3):  # both of them
        desk.say(rank, exited())
    for rank in (0, 2):
        desk.say(rank, settled(desk.generation, layouts=(0,)))
    assert desk.end is None
    assert [log.fields["ranks"] for log in logged(desk, "waits_for_restarts")] == [[1, 3]]
    for rank in (1, 3):
        return_(desk, rank)
    for rank in (0, 1, 2, 3):
        desk.say(rank, settled(desk.generation, layouts=(0,)))
    assert parse(desk.last_deploy().plan).plan.active_ranks == (0, 1, 2, 3)
    desk.join()
    assert desk.phase is Phase.RUNNING


def test_the_order_to_start_names_the_executor_that_it_replaces():
    """So that it starts one however often it arrives."""
    desk = desk_of()
    old = started()
    desk.say(3, old)
    lose(desk, 3)
    desk.do(desk.coordinator.reached([3], desk.clock.now_s()))
    assert [order.after for _, order in desk.sent(Respawn)] == [old.pid, old.pid]


def test_what_a_dead_executor_said_last_does_not_kill_the_next_one():
    """Its beats say that it runs; they come when it is dead, and when the next one has started."""
    desk = desk_of()
    old, new = started(), started()
    desk.say(3, old)
    late = Beat(step=0, instruction=0, generation=desk.generation, runs=True, pid=old.pid)
    lose(desk, 3)
    desk.say(3, late)
    desk.say(3, new)
    desk.say(3, late)
    desk.say(3, ready())
    desk.say(3, late)
    desk.say(3, ExecutorExited(code=-9, last_words="", pid=old.pid))
    assert not desk.sent(Fence)
    assert desk.coordinator.returned == {3}
    assert len(desk.sent(Respawn)) == 1


def test_a_start_that_is_said_again_is_no_other_start():
    """Neither for the log nor for the budget."""
    desk = desk_of()
    lose(desk, 3)
    again = started()
    for _ in range(5):
        desk.say(3, again)
    assert len(logged(desk, "executor_started")) == 1
    assert not desk.sent(Fence)


def test_an_executor_that_was_taken_for_lost_and_runs_on_is_killed_by_its_number():
    """The order says which one is meant: it may arrive when another one has started."""
    desk = desk_of()
    old = started()
    desk.say(3, old)
    runs = Beat(step=0, instruction=0, generation=desk.generation, runs=True, pid=old.pid)
    desk.gone(3)
    desk.say(3, runs)
    desk.say(3, runs)
    assert [fence.pid for _, fence in desk.sent(Fence)] == [old.pid]
    desk.do(desk.coordinator.reached([3], desk.clock.now_s()))
    assert [fence.pid for _, fence in desk.sent(Fence)] == [old.pid, old.pid]


def test_orders_that_were_lost_with_a_monitor_are_given_again():
    """The one to start until something starts; the one to yield until all have left."""
    desk = desk_of()
    lose(desk, 3)
    reach = lambda: desk.do(desk.coordinator.reached(range(4), desk.clock.now_s()))  # noqa: E731
    reach()
    assert [rank for rank, _ in desk.sent(Respawn)] == [3, 3]
    return_(desk, 3)
    run_steps(desk, 2 * GOOD)
    assert len(yields(desk)) == 1
    reach()
    assert yields(desk) == 2 * yields(desk)[:1]
    grow(desk)
    reach()
    assert (len(yields(desk)), len(desk.sent(Respawn))) == (2, 2)
    assert desk.alive == [0, 1, 2, 3]


def test_a_rank_whose_supervisor_is_gone_cannot_be_told_to_start():
    """It may come back with a new supervisor, which the launcher starts."""
    desk = desk_of()
    desk.gone(3)
    desk.settle()
    desk.join()
    assert not desk.sent(Respawn)
    return_(desk, 3)
    run_steps(desk, 2 * GOOD)
    assert yields(desk)


def test_a_new_supervisor_that_waits_is_told_to_start():
    """Also where nobody said that the one before had gone."""
    desk = desk_of()
    desk.gone(3)
    desk.settle()
    desk.join()
    desk.say(3, Hello(pid=7, has_executor=False))
    assert [rank for rank, _ in desk.sent(Respawn)] == [3]
    desk.say(2, Hello(pid=8, has_executor=False))
    assert desk.alive == [0, 1]
    assert [rank for rank, _ in desk.sent(Respawn)] == [3, 2]


def test_a_supervisor_of_which_nothing_is_known_is_told_to_start_after_a_while():
    """Its beats come, and what it said was said to another coordinator."""
    desk = desk_of()
    desk.gone(3)
    desk.settle()
    desk.join()
    desk.say(3, BEAT)
    assert not desk.sent(Respawn)
    desk.wait(desk.timing.silent_s + 0.1, beats=BEAT)
    desk.say(3, BEAT)
    assert [rank for rank, _ in desk.sent(Respawn)] == [3]


def test_what_is_said_again_counts_once():
    """A monitor that is new has its supervisors say their last words again."""
    desk = desk_of(restarts=2)
    lose(desk, 3)
    for _ in range(5):
        desk.say(3, exited())
    assert len(desk.sent(Respawn)) == 1
    return_(desk, 3)
    for _ in range(5):
        desk.say(3, ready())
    returned = [log for log in desk.all_of(Log) if log.kind == "rank_returned"]
    assert len(returned) == 1
    run_steps(desk, GOOD)
    assert len(yields(desk)) == 1


def test_a_returned_rank_is_counted_on_only_when_it_was_good_for_a_while():
    """N iterations after it was seen back; then one member is asked to yield, once."""
    desk = desk_of()
    run_steps(desk, 5)
    lose(desk, 3)
    run_steps(desk, 2)
    return_(desk, 3)
    run_steps(desk, GOOD - 1)
    assert not yields(desk)
    run_steps(desk, 1)
    ((rank, request),) = yields(desk)
    assert (rank, request.generation, request.what) == (0, desk.generation, "yield")
    run_steps(desk, 5)  # the vote that brings it is still to come
    assert len(yields(desk)) == 1


def test_the_plan_grows_back_at_the_boundary_and_no_step_is_redone():
    """Members settle by themselves; the new plan has the rank, says so and gives it state."""
    desk = desk_of()
    run_steps(desk, 2)
    lose(desk, 3)
    return_(desk, 3)
    run_steps(desk, GOOD)
    before, steps = desk.generation, len(desk.coordinator.records)
    desk.settle_next(steps)
    assert desk.phase is Phase.OPENING
    assert desk.generation == before + 1
    deploy = desk.last_deploy()
    plan = parse(deploy.plan).plan
    assert (plan.returned, plan.lost, plan.resume) == ((3,), (), None)
    assert plan.active_ranks == tuple(desk.world)
    assert deploy.commit.version == steps
    assert deploy.peers.keys() == set(desk.world)
    desk.join()
    assert desk.phase is Phase.RUNNING
    assert desk.alive == list(desk.world)
    (line,) = [say.line for say in desk.all_of(Say) if say.line.startswith("+")]
    assert line.startswith("+ rank 3 is back: the healthy layout")
    (cause,) = [made.cause for made in desk.all_of(PlanMade)][2:]
    assert cause.startswith("rank 3 back")
    run_steps(desk, 1)


def test_a_rank_that_comes_in_leaves_first_whatever_it_is_in():
    """Its node was cut off, and it may be in the generation still that it was lost from."""
    desk = desk_of()
    run_steps(desk, 2)
    lose(desk, 3)
    return_(desk, 3)
    run_steps(desk, GOOD)
    generation, steps = desk.generation + 1, len(desk.coordinator.records)
    for rank in parse(desk.last_deploy().plan).plan.active_ranks:
        desk.say(rank, settled(generation, steps))
    for rank in set(desk.closed()) - {3}:
        desk.say(rank, settled(generation, steps))
    told = [each.message for each in desk.all_of(Send) if each.rank == 3]
    kinds = [type(message) for message in told]
    close = kinds.index(Close)
    assert Deploy in kinds[close:]
    assert told[close] == Close(generation=desk.generation)
    for has_left in (False, True):  # its monitor is new: neither may have arrived
        before = len(desk.actions)
        desk.do(desk.coordinator.reached([3], desk.clock.now_s()))
        again = [type(each.message) for each in desk.actions[before:] if isinstance(each, Send)]
        assert again == [Resend, *([] if has_left else [Close]), Deploy]
        desk.say(3, settled(desk.generation))


def test_members_that_yielded_are_not_closed_but_standby_ranks_are():
    """A member that is told while it completes the step would have to roll forward."""
    desk = desk_of(tp=4, pp=1)
    lose(desk, 3)
    plan = parse(desk.last_deploy().plan).plan
    standby = set(plan.standby)
    assert standby, "TP 4 leaves some over"
    return_(desk, 3)
    run_steps(desk, GOOD)
    desk.say(min(plan.active_ranks), settled(desk.generation + 1, GOOD))
    assert set(desk.closed()) == standby
    assert desk.phase is Phase.SETTLING


def test_nobody_stops_for_the_loss_of_a_standby_rank():
    """The generation runs on; the next plan knows, and the rank may come back with that."""
    desk = desk_of(tp=4, pp=1)
    lose(desk, 3)
    plan = parse(desk.last_deploy().plan).plan
    standby, other = plan.standby
    generation = desk.generation
    desk.say(standby, exited())
    assert (desk.phase, desk.generation) == (Phase.RUNNING, generation)
    assert standby not in desk.alive
    assert [rank for rank, _ in desk.sent(Respawn)] == [3, standby]
    assert any(say.line.startswith(f"! lost standby rank {standby}") for say in desk.all_of(Say))
    run_steps(desk, 1)
    return_(desk, standby)
    run_steps(desk, 2 * GOOD)
    assert not yields(desk), "the plan that runs never lost it"
    desk.say(other, exited())
    lose(desk, plan.active_ranks[-1])
    assert standby in parse(desk.last_deploy().plan).plan.lost


def test_the_loss_of_a_standby_rank_while_a_plan_opens_closes_it():
    """It may have state to give away."""
    desk = desk_of(tp=4, pp=1)
    lose(desk, 3)
    (standby, _) = parse(desk.last_deploy().plan).plan.standby
    desk.say(5, exited())
    desk.settle(0)
    generation = desk.generation
    assert desk.phase is Phase.OPENING
    desk.say(standby, exited())
    assert (desk.phase, desk.generation) == (Phase.SETTLING, generation + 1)


def test_a_member_that_missed_the_end_of_the_vote_is_told_to_leave():
    """Its peers left before it had their contributions: it rolls forward."""
    desk = desk_of()
    lose(desk, 3)
    return_(desk, 3)
    run_steps(desk, GOOD)
    active = parse(desk.last_deploy().plan).plan.active_ranks
    desk.say(active[0], settled(desk.generation + 1, GOOD))
    desk.wait(desk.timing.stopped_s + 0.1)
    assert set(desk.closed()) == set(desk.alive) - {active[0]}
    assert not desk.sent(Fence)


def test_a_loss_before_the_boundary_voids_what_was_decided():
    """The rank stays returned, and the plan grows later."""
    desk = desk_of()
    lose(desk, 3)
    return_(desk, 3)
    run_steps(desk, GOOD)
    assert yields(desk)
    lose(desk, 2)
    plan = parse(desk.last_deploy().plan).plan
    assert not plan.returned
    assert 3 in plan.lost
    run_steps(desk, 1)
    assert len(yields(desk)) == 2
    grow(desk)
    assert 3 in desk.alive


def test_a_loss_while_the_larger_plan_opens_sends_the_newcomer_back():
    """It holds no state yet: the survivors go on from the layout that they have, without it."""
    desk = desk_of()
    lose(desk, 3)
    return_(desk, 3)
    run_steps(desk, GOOD)
    desk.settle_next(GOOD)
    assert desk.phase is Phase.OPENING
    desk.say(2, exited())
    assert set(desk.closed()) == {0, 1, 3}, "all leave the generation that opened"
    assert desk.alive == [0, 1]
    desk.settle(GOOD)
    plan = parse(desk.last_deploy().plan).plan
    assert set(plan.lost) == {2, 3}
    desk.join()
    run_steps(desk, 1)
    assert yields(desk)[1:], "the newcomer was good all the time"


def test_a_newcomer_that_dies_while_it_comes_in_is_lost_again():
    desk = desk_of()
    lose(desk, 3)
    return_(desk, 3)
    run_steps(desk, GOOD)
    desk.settle_next(GOOD)
    desk.say(3, exited())
    assert desk.alive == [0, 1, 2]
    desk.settle(GOOD)
    desk.join()
    assert [rank for rank, _ in desk.sent(Respawn)] == [3], "the next one only after a pause"
    desk.wait(desk.timing.silent_s / 2, beats=BEAT)
    assert len(desk.sent(Respawn)) == 1


def test_a_rank_that_dies_before_it_takes_part_is_given_up():
    """[T10] After the budget of starts without a step of its own; the others go on."""
    desk = desk_of(restarts=2)
    lose(desk, 3)
    for _ in range(4):
        desk.say(3, started())
        desk.say(3, exited())
        for _ in range(4):  # each shorter than a stall
            run_steps(desk, 1)
            desk.wait(20.0, beats=BEAT)
    assert len(desk.sent(Respawn)) == 2
    assert any("rank 3 is not started again" in say.line for say in desk.all_of(Say))
    assert desk.phase is Phase.RUNNING


def test_a_rank_that_takes_part_has_its_budget_back():
    """It may be lost any number of times, if each time it trained before; each time it must be
    good twice as long."""
    desk = desk_of(restarts=1)
    for relapse in range(3):
        lose(desk, 3)
        return_(desk, 3)
        run_steps(desk, GOOD << relapse)
        assert len(yields(desk)) == relapse + 1
        grow(desk)
        run_steps(desk, 1)
    assert len(desk.sent(Respawn)) == 3


def at_of(desk: Desk, rank: int, **fields: object) -> At:
    """Where `rank` is: at its first F since long ago."""
    ops = [i.op for i in expand(parse(desk.last_deploy().plan).plan, rank).instrs]
    at = At(generation=desk.generation, runs=True, doing="runs", step=0, compute=ops.index(Op.F))
    return msgspec.structs.replace(at, since_s=1000.0, **fields)


def test_what_was_said_of_a_closed_generation_is_not_judged_in_the_next():
    """[T26] Answers of a dead session are dropped, also where the same rank is back."""
    desk = desk_of(pp=2, dp=1)
    old = {0: at_of(desk, 0), 1: at_of(desk, 1, compute_waits=True, receives=(0,))}
    run_steps(desk, 1)
    desk.say(0, Trouble(generation=desk.generation, what="a connection broke"))
    desk.wait(desk.timing.silent_s + 0.1, beats=BEAT)
    desk.settle(1)
    desk.join()
    while not desk.sent(AskWhere):
        desk.wait(1.0, beats=BEAT)
    for rank, at in old.items():
        desk.say(rank, at)
    for _ in range(70):
        desk.wait(1.0, beats=BEAT)
    assert not desk.sent(Fence)
    assert desk.end is not None
    assert "rank 0 at step 0 instruction 0" in desk.end.reason, "nobody has answered"


def test_the_pause_of_a_dead_executor_does_not_cover_the_next_one():
    """[T26] It ended with the process that declared it."""
    desk = desk_of()
    pause = Pause(number=1, reason="compiles", at_most_s=3000.0)
    desk.say(3, Beat(step=0, instruction=3, pause=pause))
    lose(desk, 3)
    return_(desk, 3)
    run_steps(desk, GOOD)
    grow(desk)
    assert 3 in desk.alive
    for _ in range(125):
        desk.wait(1.0, beats=BEAT)
    assert desk.end is not None
    assert desk.end.reason.startswith("no instruction finished")


def sealed(rank: int, generation: int, version: int) -> Sealed:
    return Sealed(rank=rank, generation=generation, version=version, updates=version)


def alone() -> Desk:
    """Two stages and no replica: there is no plan without either rank."""
    desk = desk_of(restarts=2, pp=2, dp=1)
    run_steps(desk, 4)
    return desk


def settle_with(desk: Desk, rank: int, *seals: Sealed, layouts: tuple[int, ...] = (1,)) -> None:
    message = settled(desk.generation, 0 if layouts == (0,) else 4)
    desk.say(rank, msgspec.structs.replace(message, layouts=layouts, snapshots=seals))


def test_where_no_plan_can_do_without_a_rank_its_new_executor_takes_its_place():
    """With the state of its own snapshot; the others wait for it, and no step is lost."""
    desk = alone()
    desk.say(1, exited())
    settle_with(desk, 0, sealed(1, 1, 4))
    assert desk.phase is Phase.SETTLING
    assert desk.end is None
    desk.wait(3 * desk.timing.settle_s, beats=BEAT)
    assert not desk.sent(Fence), "who has settled is not stuck"
    return_(desk, 1)
    assert desk.closed() == [0, 1]
    settle_with(desk, 1, sealed(1, 1, 4), layouts=(0,))
    assert desk.phase is Phase.OPENING
    assert desk.alive == [0, 1]
    deploy = desk.last_deploy()
    assert (deploy.base, deploy.commit.version) == (1, 4)
    assert parse(deploy.plan).plan.active_ranks == (0, 1)
    desk.join()
    run_steps(desk, 1)


@pytest.mark.parametrize("gone", [(1,), (0, 1)])
def test_supervisors_that_were_killed_are_waited_for_where_nothing_goes_without_them(
    gone: tuple[int, ...],
):
    """Also where nobody is left: they are started again, and snapshots are in shared memory."""
    desk = alone()
    for rank in gone:
        desk.gone(rank)
    for rank in {0, 1} - set(gone):
        settle_with(desk, rank, sealed(1, 1, 4))
    desk.wait(desk.timing.silent_s / 2)
    assert desk.end is None
    for rank in gone:
        desk.say(rank, Hello(pid=7, has_executor=False))
    assert [rank for rank, _ in desk.sent(Respawn)] == list(gone)
    for rank in gone:
        return_(desk, rank)
    for rank in gone:
        seals = [sealed(rank, 1, 4)]
        settle_with(desk, rank, *seals, layouts=(0,))
    assert desk.phase is Phase.OPENING
    assert desk.last_deploy().commit.version == 4


@pytest.mark.parametrize("gone", [(1,), (0, 1)])
def test_supervisors_that_do_not_come_back_end_the_job(gone: tuple[int, ...]):
    """After the bound of silence, with 4."""
    desk = alone()
    for rank in gone:
        desk.gone(rank)
    for rank in {0, 1} - set(gone):
        settle_with(desk, rank, sealed(1, 1, 4))
    desk.wait(desk.timing.silent_s / 2, beats=BEAT)
    assert desk.end is None
    desk.wait(desk.timing.silent_s, beats=BEAT)
    assert desk.end is not None
    assert desk.end.exit_code == 4


def test_where_no_plan_is_left_ranks_that_are_back_are_taken_in_before_they_are_trusted():
    """The lost member's shard comes from its snapshot, and the iteration is redone."""
    desk = desk_of(pp=2, dp=2)
    run_steps(desk, 4)
    for rank in (2, 3):
        lose(desk, rank)
    return_(desk, 2)
    generation = desk.generation
    desk.say(1, exited())
    held = settled(desk.generation, 4, layouts=(generation,))
    snapshots = (sealed(1, generation, 4),)
    desk.say(0, msgspec.structs.replace(held, snapshots=snapshots))
    assert desk.phase is Phase.OPENING
    assert desk.alive == [0, 2]
    plan = parse(desk.last_deploy().plan).plan
    assert (plan.active_ranks, plan.returned) == ((0, 2), (2,))
    assert desk.last_deploy().commit.version == 4
    desk.join()
    assert [log.fields["ranks"] for log in logged(desk, "rejoined")] == [[2]]
    run_steps(desk, 1)


def test_a_rank_that_was_taken_in_and_is_lost_at_once_waits_again_with_the_rest():
    """What opened without a member is closed, and no rank is counted twice."""
    desk = desk_of(pp=2, dp=2)
    run_steps(desk, 4)
    for rank in (2, 3):
        lose(desk, rank)
    return_(desk, 2)
    return_(desk, 3)
    generation = desk.generation
    desk.say(1, exited())
    held = settled(desk.generation, 4, layouts=(generation,))
    desk.say(0, msgspec.structs.replace(held, snapshots=(sealed(1, generation, 4),)))
    assert desk.alive == [0, 2, 3]
    desk.say(2, exited())
    assert desk.alive == [0]
    assert desk.coordinator.returned == {3}
    held = settled(desk.generation, 4, layouts=(generation,))
    desk.say(0, msgspec.structs.replace(held, snapshots=(sealed(1, generation, 4),)))
    assert desk.alive == [0, 3]
    desk.join()
    run_steps(desk, 1)


def test_where_it_never_gets_ready_the_job_ends_with_one_sentence():
    """[T12] When its starts are used up: exit code 4, in one generation for all."""
    desk = alone()
    desk.say(1, exited())
    settle_with(desk, 0, sealed(1, 1, 4))
    for _ in range(20):
        if desk.end is None:
            desk.say(1, started())
            desk.say(1, exited())
            desk.wait(5.0, beats=BEAT)
    assert desk.end is not None
    assert desk.end.exit_code == 4
    assert "no plan can carry the loss of rank 1" in desk.end.reason
    assert len(desk.sent(Respawn)) == 2
    assert {rank for rank, _ in desk.sent(Stop)} == {0, 1}


def test_one_without_a_snapshot_cannot_take_its_place():
    """[T12] It holds nothing, and there is no plan without it: the job ends at once, for all."""
    desk = alone()
    desk.say(1, exited())
    settle_with(desk, 0, sealed(1, 1, 3))
    return_(desk, 1)
    settle_with(desk, 1, layouts=(0,))
    assert not desk.sent(Fence)
    assert desk.end is not None
    assert desk.end.exit_code == 4
    assert {rank for rank, _ in desk.sent(Stop)} == {0, 1}


def test_no_rank_comes_back_where_the_job_says_so():
    desk = desk_of(restarts=0)
    lose(desk, 3)
    assert not desk.sent(Respawn)
    desk.say(3, started())
    assert [rank for rank, _ in desk.sent(Fence)] == [3]


def test_a_rank_that_reads_other_data_is_not_taken_back():
    """It would train on other samples than those that the ledger says."""
    desk = desk_of()
    lose(desk, 3)
    return_(desk, 3, digest="another")
    run_steps(desk, 2 * GOOD)
    assert not yields(desk)
    assert [rank for rank, _ in desk.sent(Fence)] == [3]


def test_a_start_that_never_gets_ready_was_in_vain():
    """The order may be lost, or the executor hangs, which the next start ends."""
    desk = desk_of()
    lose(desk, 3)
    for _ in range(4):  # each shorter than a stall
        run_steps(desk, 1)
        desk.wait(desk.timing.start_s / 4 + 1, beats=BEAT)
    assert len(desk.sent(Respawn)) == 1
    for _ in range(2):
        run_steps(desk, 1)
        desk.wait(desk.timing.silent_s, beats=BEAT)
    assert [rank for rank, _ in desk.sent(Respawn)] == [3, 3]


def test_a_returned_rank_that_falls_silent_or_loses_its_supervisor_is_not_counted_on():
    desk = desk_of()
    lose(desk, 3)
    return_(desk, 3)
    desk.gone(3)
    run_steps(desk, 2 * GOOD)
    assert not yields(desk)


def test_a_returned_rank_hears_of_the_end_of_the_job():
    desk = desk_of(steps=2)
    lose(desk, 3)
    return_(desk, 3)
    run_steps(desk, 2)
    desk.finish()
    assert 3 in [rank for rank, _ in desk.sent(Stop)]


def test_the_plan_does_not_grow_right_before_the_end():
    desk = desk_of(steps=GOOD)
    lose(desk, 3)
    return_(desk, 3)
    run_steps(desk, GOOD)
    assert not yields(desk)


def test_reopening_after_growth_uses_a_plan_of_its_own():
    """The larger plan moved state once; a generation that only opens anew moves nothing."""
    desk = desk_of()
    lose(desk, 3)
    return_(desk, 3)
    run_steps(desk, GOOD)
    grow(desk)
    run_steps(desk, 1)
    desk.say(0, Trouble(generation=desk.generation, what="a connection broke"))
    desk.wait(desk.timing.silent_s + 0.1, beats=BEAT)
    steps = len(desk.coordinator.records)
    desk.settle(steps)
    plan = parse(desk.last_deploy().plan).plan
    assert not plan.returned
    assert not plan.reconfigure
    assert [m.base for _, m in desk.sent(Deploy)][-1] == desk.generation - 1


def test_what_is_logged_tells_the_way_back():
    desk = desk_of()
    lose(desk, 3)
    return_(desk, 3)
    run_steps(desk, GOOD)
    grow(desk)
    kinds = [log.kind for log in desk.all_of(Log)]
    order = ["rank_lost", "respawn", "executor_started", "rank_returned", "growth", "rejoined"]
    found = [kind for kind in kinds if kind in order and kind != "running"]
    assert found[found.index("rank_lost") :] == order
    assert not desk.sent(Close)[-1][1].generation > desk.generation
    assert record_of(0).step == 0


def test_an_operator_is_told_what_becomes_of_a_lost_rank():
    """It starts, is trusted after some iterations, is given up, or is gone with its supervisor."""
    desk = desk_of(restarts=1)

    def out() -> dict[int, str]:
        return desk.coordinator.positions({}, desk.clock.now_s()).out

    assert out() == {}
    lose(desk, 1)
    assert out()[1].startswith("lost; its executor starts, for ")
    return_(desk, 1)
    run_steps(desk, 1)
    trusted = "is back, and waits to be trusted: {} more without a loss"
    assert out() == {1: trusted.format(f"{GOOD - 1} iterations")}
    run_steps(desk, GOOD - 2)
    assert out() == {1: trusted.format("1 iteration")}
    desk.say(1, exited())
    assert out() == {1: "lost, and given up: 1 start without a step of its own"}
    desk.gone(1)
    assert out() == {1: "lost, and its supervisor with it"}
