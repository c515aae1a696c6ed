"""The coordinator's decisions, one by one: who hears what when, and every way to an end."""

from __future__ import annotations

import msgspec
import pytest
from coordinator_cases import STORE, Desk, exited, job_of, ready, record_of, settled

from resihp.errors import PlanRejected
from resihp.ir.diagnostics import Diagnostic, Span
from resihp.ir.expand import expand
from resihp.ir.model import Op
from resihp.ir.parser import parse
from resihp.monitor.actions import Evict, Log, PlanMade, Say, Seen, StepCommitted
from resihp.monitor.coordinator import Phase
from resihp.monitor.planner import Planner, VerifiedPlan
from resihp.wire.address import LOOPBACK, Address
from resihp.wire.messages import (
    AskWhere,
    At,
    Beat,
    Close,
    Deploy,
    ExecutorExited,
    Fault,
    Fence,
    Finished,
    Go,
    Joined,
    NoBuddyCopy,
    Observed,
    Pause,
    StepDone,
    Stop,
    StoreAt,
    StoreOpened,
    Trouble,
)

BEAT = Beat(step=0, instruction=3)

# --- the way to the first step


def test_the_plan_is_deployed_when_the_last_rank_is_ready():
    """Not before; then everybody gets the same plan, from nothing (base 0), at version 0."""
    desk = Desk()
    for rank in list(desk.world)[:-1]:
        desk.say(rank, ready())
    assert not desk.sent(Deploy)
    desk.say(desk.world[-1], ready())
    deploy = desk.last_deploy()
    assert (deploy.generation, deploy.base, deploy.previous_plan) == (1, 0, None)
    assert (deploy.commit.version, deploy.commit.record) == (0, None)
    assert desk.phase is Phase.OPENING
    assert [(plan.generation, plan.text) for plan in desk.all_of(PlanMade)] == [(1, deploy.plan)]


def test_the_address_of_the_store_is_passed_on_to_all():
    """Only that of the generation that opens now."""
    desk = Desk()
    desk.get_ready()
    desk.say(0, StoreOpened(generation=0, address=Address(LOOPBACK, 6)))
    assert not desk.sent(StoreAt)
    desk.say(0, StoreOpened(generation=1, address=STORE))
    assert desk.sent(StoreAt) == [
        (rank, StoreAt(generation=1, address=STORE)) for rank in desk.world
    ]


def test_nobody_goes_before_the_last_one_joined():
    """Go is the permission to drop the old layout, so it needs everybody."""
    desk = Desk()
    desk.get_ready()
    for rank in list(desk.world)[:-1]:
        desk.say(rank, Joined(generation=1, hashes={}, moved_bytes=0))
    assert not desk.sent(Go)
    desk.say(desk.world[-1], Joined(generation=1, hashes={}, moved_bytes=0))
    assert [rank for rank, _ in desk.sent(Go)] == list(desk.world)


def test_times_that_do_not_fit_the_program_are_not_kept():
    """Those of a rank's own program are, also when its generation has just been closed."""
    desk = Desk()
    desk.get_ready()
    plan = parse(desk.last_deploy().plan).plan
    times = bytes(8 * len(expand(plan, 0).instrs))
    fits = Observed(generation=1, step=0, starts_ns=times, ends_ns=times)
    desk.say(0, fits)
    desk.say(1, StepDone(generation=1, record=record_of(0), observed=fits))
    for wrong in (
        {"starts_ns": times[:-8]},
        {"ends_ns": times + b"x"},
        {"generation": 7},
    ):
        desk.say(0, msgspec.structs.replace(fits, **wrong))
    assert desk.all_of(Seen) == [Seen(0, fits), Seen(1, fits)]
    refused = [log.fields for log in desk.all_of(Log) if log.kind == "times_refused"]
    assert [fields["rank"] for fields in refused] == [0, 0]


def test_different_data_stop_the_job():
    """Ranks that read other samples would train on something that nobody asked for."""
    desk = Desk()
    desk.say(0, ready("a"))
    desk.say(1, ready("b"))
    assert desk.end is not None
    assert desk.end.exit_code == 1
    assert "dataset digests differ" in desk.end.reason


def test_an_executor_that_ends_before_the_start_stops_the_job():
    """With the last words of its log: there is nothing to recover, something to correct."""
    desk = Desk()
    desk.say(2, exited(1, "ConfigError: no such directory"))
    assert desk.end is not None
    assert desk.end.exit_code == 1
    assert desk.end.reason.startswith("rank 2 ended before the start (exit code 1)")
    assert "no such directory" in desk.end.reason


@pytest.mark.parametrize("deployed", [False, True])
def test_a_mistake_of_the_users_ends_the_job_with_2_and_its_own_words(deployed: bool):
    """Every rank would find the same one, so nobody is lost and nothing is recovered."""
    desk = Desk()
    if deployed:
        for rank in range(4):
            desk.say(rank, ready())
    desk.say(2, exited(2, 'Traceback ...\nresihp: error: [model] factory = "x:y": none\n'))
    desk.say(3, exited(2, "resihp: error: the same\n"))
    assert desk.end is not None
    assert (desk.end.exit_code, desk.end.reason) == (2, '[model] factory = "x:y": none')
    assert not desk.all_of(Say)


def test_a_supervisor_that_is_gone_before_the_start_stops_the_job():
    """As its executor's end would."""
    desk = Desk()
    desk.say(0, ready())
    desk.gone(3)
    assert desk.end is not None
    assert desk.end.exit_code == 1
    assert "rank 3" in desk.end.reason


# --- steps


def test_a_step_is_committed_once_however_many_report_it():
    """The first report counts; all ranks know the same record from the vote."""
    desk = Desk().run()
    desk.step(0)
    desk.step(1)
    assert [action.record.step for action in desk.all_of(StepCommitted)] == [0, 1]
    assert [record.step for record in desk.coordinator.records] == [0, 1]


def test_the_job_is_finished_when_every_active_rank_is():
    """Exit code 0, told to all."""
    desk = Desk().run()
    for rank in list(desk.world)[:-1]:
        desk.say(rank, Finished(generation=1))
    assert desk.phase is Phase.RUNNING
    desk.say(desk.world[-1], Finished(generation=1))
    assert desk.end is not None
    assert (desk.end.exit_code, desk.end.reason) == (0, "finished")
    assert [rank for rank, _ in desk.sent(Stop)] == list(desk.world)


# --- a loss


def test_a_loss_closes_the_generation_for_all_survivors():
    """At once, without asking anybody."""
    desk = Desk().run()
    desk.say(1, exited())
    assert desk.phase is Phase.SETTLING
    assert desk.generation == 2
    assert desk.closed() == [0, 2, 3]


def test_survivors_get_a_plan_without_the_lost_rank():
    """It follows the plan that ran, from its layout, and redoes the interrupted step."""
    desk = Desk().run()
    desk.step(0)
    first = desk.last_deploy()
    desk.say(1, exited())
    desk.settle(version=1)
    deploy = desk.last_deploy()
    plan = parse(deploy.plan).plan
    assert plan.lost == (1,)
    assert 1 not in plan.active_ranks
    assert plan.resume is not None
    assert plan.resume.step == 1
    assert (deploy.base, deploy.previous_plan) == (1, first.plan)
    assert deploy.commit.version == 1
    assert deploy.key != first.key
    desk.join()
    assert desk.phase is Phase.RUNNING


def test_everybody_alive_can_reach_everybody_alive():
    """A standby rank may have to give its shards away, so it is a peer as well."""
    desk = Desk(job_of(tp=4, pp=1, dp=2)).run()
    desk.say(1, exited())
    desk.settle()
    deploy = desk.last_deploy()
    assert parse(deploy.plan).plan.standby
    assert set(deploy.peers) == set(desk.alive)


def test_a_second_loss_while_settling_settles_anew():
    """[T5] What was settled for the generation before does not count."""
    desk = Desk(job_of(tp=2, pp=1, dp=3)).run()
    desk.say(1, exited())
    desk.say(0, settled(2))
    desk.say(5, exited())
    assert desk.generation == 3
    assert desk.closed() == [0, 2, 3, 4]
    desk.say(0, settled(2))
    for rank in (2, 3, 4):
        desk.say(rank, settled(3))
    assert desk.phase is Phase.SETTLING
    desk.say(0, settled(3))
    assert desk.phase is Phase.OPENING
    assert parse(desk.last_deploy().plan).plan.lost == (1, 5)


def test_a_loss_while_opening_goes_back_to_the_last_layout_that_ran():
    """[T5] The plan that was about to open is dropped: nobody has left the old layout yet."""
    desk = Desk(job_of(tp=2, pp=1, dp=3)).run()
    first = desk.last_deploy()
    desk.say(1, exited())
    desk.settle()
    desk.say(0, Joined(generation=2, hashes={}, moved_bytes=5))
    desk.say(4, exited())
    desk.settle()
    deploy = desk.last_deploy()
    assert (deploy.generation, deploy.base, deploy.previous_plan) == (3, 1, first.plan)
    desk.join()
    assert [incident.ranks for incident in desk.coordinator.incidents] == [[1, 4]]


def test_the_loss_of_the_store_host_moves_the_store():
    """[T7] The lowest rank that is left hosts the next one."""
    desk = Desk(job_of(tp=1, pp=1, dp=3))
    desk.get_ready()
    assert desk.last_deploy().store_rank == 0
    desk.gone(0)
    desk.settle()
    assert desk.last_deploy().store_rank == 1
    desk.join()
    assert desk.phase is Phase.RUNNING


def test_a_step_that_is_reported_late_still_counts():
    """Reports that were on their way when the generation closed are of committed steps."""
    desk = Desk().run()
    desk.say(1, exited())
    for rank in (0, 2, 3):
        desk.say(rank, StepDone(generation=1, record=record_of(0)))
        desk.say(rank, StepDone(generation=1, record=record_of(1)))
        desk.say(rank, settled(2, version=2))
    assert [record.step for record in desk.coordinator.records] == [0, 1]
    assert desk.last_deploy().commit.version == 2


def test_a_committed_step_is_never_taken_back():
    """Only a rank that is lost saw the vote, but it said so: all others can roll forward."""
    desk = Desk().run()
    desk.say(1, StepDone(generation=1, record=record_of(0, 5.0)))
    desk.say(1, exited())
    desk.settle(version=0)
    commit = desk.last_deploy().commit
    assert (commit.version, commit.updates, commit.record) == (1, 1, record_of(0, 5.0))


def test_a_step_that_a_survivor_voted_is_committed_by_the_settlement():
    """It was not reported before, and is not redone."""
    desk = Desk().run()
    desk.say(1, exited())
    desk.say(0, settled(2, version=0, voted=1))
    desk.say(2, settled(2, version=0))
    desk.say(3, settled(2, version=0))
    assert desk.last_deploy().commit.version == 1
    assert [action.record.step for action in desk.all_of(StepCommitted)] == [0]


def test_a_loss_after_the_last_step_still_ends_well():
    """Some are finished, one dies: the others regroup, find nothing to do, and finish."""
    desk = Desk(job_of(steps=1)).run()
    desk.step(0)
    desk.say(0, Finished(generation=1))
    desk.say(1, exited())
    desk.settle(version=1)
    desk.join()
    assert desk.end is None
    desk.finish()
    assert desk.end is not None
    assert desk.end.exit_code == 0


def test_a_shard_without_a_holder_ends_the_job_with_4():
    """The reason says what is lost."""
    desk = Desk(job_of(tp=2, pp=1, dp=1)).run()
    desk.step(0)
    desk.say(1, exited())
    desk.settle(version=1)
    assert desk.end is not None
    assert desk.end.exit_code == 4
    assert desk.end.reason.startswith("no plan can carry the loss of rank 1: ")


def test_the_loss_of_everybody_ends_the_job_with_4():
    """There is nobody to close a generation for."""
    desk = Desk(job_of(tp=1, pp=1, dp=2)).run()
    desk.gone(0)
    desk.gone(1)
    assert desk.end is not None
    assert (desk.end.exit_code, desk.end.reason) == (4, "no rank is left")


def test_a_lost_rank_is_not_listened_to():
    """Whatever it says after its end was declared is void."""
    desk = Desk().run()
    desk.say(1, exited())
    before = len(desk.actions)
    for message in (settled(2), StepDone(generation=1, record=record_of(0))):
        desk.say(1, message)
    desk.gone(1)
    assert len(desk.actions) == before
    assert not desk.coordinator.records


def test_the_incident_is_told_with_evidence_action_and_cost():
    """One line on the console, one event with all its times."""
    desk = Desk().run()
    desk.say(1, Fault(kind="kill", step=0, instruction=3, at_s=desk.clock.now_s()))
    desk.clock.advance(0.25)
    desk.say(1, exited())
    desk.clock.advance(0.5)
    desk.settle()
    desk.say_all(Joined(generation=2, hashes={}, moved_bytes=10))
    (say,) = desk.all_of(Say)
    assert say.line == (
        "! lost rank 1 (its executor ended with signal 9) seen after 250 ms, running again after "
        "500 ms: dp0.pp0 TP 2 -> 1, 1 stage run of micro-batches moved; step 0 is redone"
    )
    (log,) = [log for log in desk.all_of(Log) if log.kind == "incident"]
    assert log.fields["moved_bytes"] == 30
    assert log.fields["detection_ms"] == 250


@pytest.mark.parametrize("last_words", ["\n", " \n\n", "Traceback\nKeyError: 3\n"])
def test_the_last_words_of_a_crash_are_shown(last_words: str):
    """The last line, where there is any."""
    desk = Desk().run()
    desk.say(1, exited(1, last_words))
    assert [say.line for say in desk.all_of(Say)] == (
        ["rank 1: KeyError: 3"] if last_words.strip() else []
    )
    assert desk.phase is Phase.SETTLING


# --- what must never run


class Refusing(Planner):
    """A compiler that produces what the verifier refuses."""

    def after_loss(self, previous: VerifiedPlan, lost, step: int, **stored) -> VerifiedPlan:
        finding = Diagnostic(code="RHP401", message="a deadlock", span=Span(1, 1, 2))
        raise PlanRejected("the verifier refused the plan: a deadlock", [finding])


def test_a_plan_that_the_verifier_refuses_is_never_deployed():
    """The job stops instead and says what was found."""
    job = job_of()
    desk = Desk(job, Refusing(job)).run()
    desk.say(1, exited())
    desk.settle()
    assert desk.end is not None
    assert (desk.end.exit_code, "a deadlock" in desk.end.reason) == (1, True)
    assert {deploy.generation for _, deploy in desk.sent(Deploy)} == {1}
    assert [plan.generation for plan in desk.all_of(PlanMade)] == [1]
    assert Log("plan_rejected", {"findings": ["RHP401"]}) in desk.actions


def test_replicas_with_different_hashes_stop_the_job():
    """Before Go, and the reason names shard and ranks."""
    desk = Desk()
    desk.get_ready()
    for rank in desk.world:
        hashes = {"layer 0 shard 0/2": "a" if rank < 2 else "b"} if rank % 2 == 0 else {}
        desk.say(rank, Joined(generation=1, hashes=hashes, moved_bytes=0))
    assert not desk.sent(Go)
    assert desk.end is not None
    assert desk.end.exit_code == 1
    assert desk.end.reason.endswith("differ after recovery: layer 0 shard 0/2 on ranks 0 and 2")


# --- time


def test_a_start_that_takes_too_long_names_the_missing_ranks():
    """Importing torch takes seconds, but not minutes."""
    desk = Desk()
    desk.say(0, ready())
    desk.wait(desk.timing.start_s)
    assert desk.end is None
    desk.say(0, BEAT)
    desk.wait(1)
    assert desk.end is not None
    assert desk.end.exit_code == 1
    assert desk.end.reason == "ranks 1, 2, 3 did not get ready in 181 s"


def test_a_survivor_that_does_not_leave_is_fenced_once():
    """The others settled; its end then closes the generation anew."""
    desk = Desk(job_of(tp=1, pp=1, dp=3)).run()
    desk.say(0, StepDone(generation=1, record=record_of(0)))
    desk.say(0, exited())
    desk.say(1, settled(2, version=1))
    desk.wait(desk.timing.settle_s, beats=BEAT)
    assert not desk.sent(Fence)
    for _ in range(3):
        desk.wait(1, beats=BEAT)
    assert [rank for rank, _ in desk.sent(Fence)] == [2]
    desk.say(2, exited())
    desk.settle()
    desk.join()
    assert desk.phase is Phase.RUNNING


def test_an_order_to_kill_that_was_lost_with_its_monitor_is_given_again():
    """Until the executor is dead; one that took its place is not meant."""
    desk = Desk(job_of(tp=1, pp=1, dp=3)).run()
    desk.say(0, StepDone(generation=1, record=record_of(0)))
    desk.say(0, exited())
    desk.say(1, settled(2, version=1))
    desk.wait(desk.timing.settle_s + 1, beats=BEAT)
    desk.do(desk.coordinator.reached([1, 2], desk.clock.now_s()))
    assert [rank for rank, _ in desk.sent(Fence)] == [2, 2]
    desk.say(2, exited())
    desk.do(desk.coordinator.reached([1, 2], desk.clock.now_s()))
    assert len(desk.sent(Fence)) == 2


def test_a_survivor_may_finish_a_long_chunk_before_it_leaves():
    """It is computing, not hung: no chunk is longer than a step, and steps are long here."""
    desk = Desk(job_of(tp=1, pp=1, dp=2)).run()
    slow = msgspec.structs.replace(record_of(0), duration_s=60.0)
    desk.say(0, StepDone(generation=1, record=slow))
    desk.say(0, exited())
    desk.wait(179, beats=BEAT)
    assert not desk.sent(Fence)
    desk.wait(2, beats=BEAT)
    assert [rank for rank, _ in desk.sent(Fence)] == [1]


def test_before_the_first_step_nobody_knows_how_long_a_chunk_is():
    """A loss in the first step must not cost the ranks that still compute their first chunk."""
    desk = Desk(job_of(tp=1, pp=1, dp=2)).run()
    desk.say(0, exited())
    desk.wait(desk.timing.stalled_s, beats=BEAT)
    assert not desk.sent(Fence)
    desk.wait(1, beats=BEAT)
    assert [rank for rank, _ in desk.sent(Fence)] == [1]


def test_a_survivor_that_cannot_continue_from_the_common_layout_is_fenced():
    """It would train other shards than the plan says."""
    desk = Desk(job_of(tp=1, pp=1, dp=3)).run()
    desk.say(0, exited())
    desk.say(1, msgspec.structs.replace(settled(2), layouts=(0,)))
    desk.say(2, settled(2))
    assert [rank for rank, _ in desk.sent(Fence)] == [1]
    assert desk.phase is Phase.SETTLING
    desk.say(1, exited())
    desk.settle()
    desk.join()
    assert desk.phase is Phase.RUNNING


def test_a_generation_that_does_not_open_is_opened_anew_three_times():
    """Nobody is lost, so nobody can be blamed; then the job ends."""
    desk = Desk()
    desk.get_ready()
    for attempt in range(4):
        assert desk.phase is Phase.OPENING
        assert desk.generation == 1 + attempt
        desk.say(0, Joined(generation=desk.generation, hashes={}, moved_bytes=0))
        desk.wait(desk.timing.join_s, beats=BEAT)
        assert desk.phase is Phase.OPENING
        desk.wait(1, beats=BEAT)
        if desk.phase is Phase.SETTLING:
            desk.settle()
    assert desk.end is not None
    assert desk.end.exit_code == 1
    assert desk.end.reason == "not all ranks joined in 31 s, 4 times in a row"
    assert not desk.sent(Go)


def test_attempts_are_counted_anew_after_a_loss():
    """A rank that is lost explains why the generations before did not open."""
    desk = Desk(job_of(tp=1, pp=1, dp=3))
    desk.get_ready()
    for lost in (None, None, 2, None, None, None):
        desk.wait(desk.timing.join_s + 1, beats=BEAT)
        if lost is not None:
            desk.say(lost, exited())
        desk.settle()
        assert desk.phase is Phase.OPENING
    desk.join()
    assert desk.phase is Phase.RUNNING


def test_a_job_without_progress_ends_and_says_who_stands_where():
    """Nobody can be blamed, so nobody is evicted."""
    desk = Desk(job_of(tp=1, pp=1, dp=2)).run()
    for _ in range(121):
        desk.wait(1, beats=BEAT)
    assert desk.end is None
    desk.wait(1, beats=BEAT)
    assert desk.end is not None
    assert desk.end.exit_code == 1
    assert desk.end.reason == (
        "no instruction finished for 120 s "
        "(rank 0 at step 0 instruction 3, rank 1 at step 0 instruction 3)"
    )


def test_who_holds_all_others_up_is_fenced_and_if_that_does_not_help_the_job_ends():
    """Asked half-way to the end, ranks say where they are; it is told in the words of the plan."""
    desk = Desk(job_of(tp=1, pp=2, dp=1)).run()
    for _ in range(62):
        desk.wait(1, beats=BEAT)
    assert [rank for rank, _ in desk.sent(AskWhere)] == [0, 1]
    instrs = [[i.op for i in expand(parse(desk.last_deploy().plan).plan, r).instrs] for r in (0, 1)]
    at = At(generation=1, runs=True, doing="runs", step=0)
    waits = {"compute_waits": True, "receives": (instrs[1].index(Op.RECV_ACT),)}
    desk.say(0, msgspec.structs.replace(at, compute=instrs[0].index(Op.F)))
    desk.say(1, msgspec.structs.replace(at, compute=instrs[1].index(Op.F), **waits))
    for _ in range(61):
        desk.wait(1, beats=BEAT)
    assert [rank for rank, _ in desk.sent(Fence)] == [0]
    assert desk.end is None, "its death frees the others"
    for _ in range(6):
        desk.wait(1, beats=BEAT)
    assert desk.end is not None
    assert desk.end.reason == (
        "no instruction finished for 120 s (rank 1 waits in the end for rank 0, which computes "
        "`F 0`, for 0.0 s)"
    )
    hang = [log.fields for log in desk.all_of(Log) if log.kind == "hang"][-1]
    assert "whose rank 0 is at `F 0`" in str(hang["ranks"])


def test_a_declared_pause_is_no_stall():
    """[T27] While it lasts, and no longer than was declared."""
    desk = Desk(job_of(tp=1, pp=1, dp=2)).run()
    paused = Beat(step=0, instruction=3, pause=Pause(number=1, reason="compiles", at_most_s=300.0))
    for _ in range(300):
        desk.wait(1, beats=paused)
    assert desk.end is None
    for _ in range(120):
        desk.wait(1, beats=paused)
    assert desk.end is None
    desk.wait(1, beats=paused)
    assert desk.end is not None
    (first, *_) = [log.fields for log in desk.all_of(Log) if log.kind == "pause"]
    assert first == {"rank": 0, "reason": "compiles", "at_most_s": 300.0}


def test_a_pause_of_a_lost_rank_ends_with_it():
    """[T26] Nobody waits for the dead."""
    desk = Desk(job_of(tp=1, pp=1, dp=3)).run()
    desk.say(0, Beat(step=0, instruction=3, pause=Pause(number=1, reason="x", at_most_s=3000.0)))
    desk.say(0, exited())
    desk.wait(desk.timing.stalled_s, beats=BEAT)
    desk.wait(1, beats=BEAT)
    assert desk.sent(Fence)


def test_a_long_step_is_not_a_stall_where_steps_are_long():
    """Three times the longest step is allowed for one instruction."""
    desk = Desk(job_of(tp=1, pp=1, dp=1)).run()
    slow = msgspec.structs.replace(record_of(0), duration_s=60.0)
    desk.say(0, StepDone(generation=1, record=slow))
    for _ in range(181):
        desk.wait(1, beats=BEAT)
    assert desk.end is None
    desk.wait(1, beats=BEAT)
    assert desk.end is not None


def test_a_step_that_takes_longer_than_the_bound_is_no_stall_while_instructions_finish():
    """The first step of a slow job: nobody knows how long it is, but it gets on."""
    desk = Desk(job_of(tp=1, pp=1, dp=1)).run()
    for instruction in range(10):
        desk.wait(100, beats=Beat(step=0, instruction=instruction))
    assert desk.end is None


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.SETTLING, Phase.OPENING, Phase.RUNNING])
def test_a_supervisor_that_falls_silent_is_evicted_once(phase: Phase):
    """In every phase; it is lost when its connection breaks, not before."""
    desk = Desk()
    desk.say_all(BEAT)
    desk.bring_to(phase)
    for _ in range(8):
        desk.clock.advance(1)
        for rank in set(desk.alive) - {1}:
            desk.say(rank, BEAT)
        desk.wait(0)
    assert desk.all_of(Evict) == [Evict(1)]
    assert 1 in desk.alive
    desk.gone(1)
    assert 1 not in desk.alive


# --- ending from outside


@pytest.mark.parametrize("phase", [each for each in Phase if each is not Phase.SAVING])
def test_a_signal_ends_the_job_in_every_phase(phase: Phase):
    """Everybody is told once; afterwards nothing is decided any more."""
    desk = Desk()
    desk.bring_to(phase)
    assert desk.phase is phase
    desk.actions += desk.coordinator.stop("stopped by SIGTERM", 143, desk.clock.now_s())
    assert desk.end is not None
    assert desk.end.exit_code == (0 if phase is Phase.STOPPING else 143)
    assert [rank for rank, _ in desk.sent(Stop)] == list(desk.world)
    before = len(desk.actions)
    desk.say(0, exited())
    desk.gone(1)
    desk.wait(1000)
    assert len(desk.actions) == before
    assert desk.sent(Close) == [] or phase is Phase.SETTLING


TROUBLE = "the connection from rank 1 broke"


def test_a_broken_connection_without_a_loss_opens_a_new_generation():
    """Two live ranks cannot talk: after the time in which a loss is found, all start anew."""
    desk = Desk().run()
    desk.say(0, Trouble(generation=1, what=TROUBLE))
    desk.wait(desk.timing.silent_s * 0.9, beats=BEAT)
    assert not desk.sent(Close)
    desk.wait(desk.timing.silent_s * 0.2, beats=BEAT)
    assert desk.sent(Close) == [(rank, Close(generation=2)) for rank in desk.world]
    assert not desk.coordinator.incidents


def test_trouble_that_a_loss_explains_opens_one_generation_only():
    """The usual case: survivors see broken connections just before the verdict."""
    desk = Desk().run()
    desk.say(0, Trouble(generation=1, what=TROUBLE))
    desk.say(1, exited())
    for rank in desk.alive:
        desk.say(rank, settled(2))
    desk.join()
    desk.wait(desk.timing.silent_s * 1.1, beats=BEAT)
    assert desk.generation == 2


def test_trouble_that_comes_back_before_every_step_ends_the_job():
    """New generations that all break before a step is finished are not opened for ever."""
    desk = Desk().run()
    while desk.phase is Phase.RUNNING:
        desk.say(0, Trouble(generation=desk.generation, what=TROUBLE))
        desk.wait(desk.timing.silent_s * 1.1, beats=BEAT)
        if desk.phase is Phase.SETTLING:
            desk.say_all(settled(desk.generation))
            desk.join()
    assert desk.generation == 4
    assert desk.end is not None
    assert desk.end.exit_code == 1


def test_a_copy_that_is_not_made_is_an_event_of_the_run():
    """[T14] With the rank, its buddy and the reason; also while the generation opens."""
    desk = Desk()
    desk.bring_to(Phase.OPENING)
    news = NoBuddyCopy(generation=1, buddy=1, why="rank 1 cannot keep them")
    desk.say(0, news)
    fields = {"rank": 0, "generation": 1, "buddy": 1, "why": news.why}
    assert Log("no_buddy_copy", fields) in desk.actions
    assert desk.phase is Phase.OPENING


def test_a_loss_while_all_start_anew_without_a_loss_is_an_incident_of_its_own():
    """Not part of the one before, which is closed."""
    desk = Desk(job_of(tp=1, dp=3)).run()
    desk.say(2, exited())
    for rank in desk.alive:
        desk.say(rank, settled(2))
    desk.join()
    desk.say(0, Trouble(generation=2, what=TROUBLE))
    desk.wait(desk.timing.silent_s * 1.1, beats=BEAT)
    assert desk.phase is Phase.SETTLING
    desk.say(1, exited())
    desk.say(0, settled(4))
    desk.join()
    assert [incident.ranks for incident in desk.coordinator.incidents] == [[2], [1]]
    assert all(incident.resumed_s is not None for incident in desk.coordinator.incidents)


def test_a_rank_that_neither_settles_nor_dies_ends_the_job():
    """A fence that does not work (a process in the kernel's hands) must not hold all for ever."""
    desk = Desk().run()
    desk.say(0, StepDone(generation=1, record=record_of(0)))
    desk.say(1, exited())
    desk.say(0, settled(2, version=1))
    desk.wait(desk.timing.settle_s * 1.1, beats=BEAT)
    assert [rank for rank, _ in desk.sent(Fence)] == [2, 3]
    desk.wait(desk.timing.settle_s, beats=BEAT)
    assert desk.end is not None
    assert desk.end.reason == "ranks 2, 3 neither settled nor died in 21 s"


def test_why_an_executor_was_killed_comes_with_its_end():
    """Also for a coordinator that was not there when its supervisor said what hit it."""
    desk = Desk().run()
    end = ExecutorExited(
        code=-9, last_words="", pid=7, fenced="it was stopped for 0.3 s", hit_s=-1.5, seen_s=-0.5
    )
    desk.say(3, end)
    (incident,) = desk.coordinator.incidents
    assert incident.evidence == "fenced: it was stopped for 0.3 s"
    assert incident.detection_ms == 1000 * (desk.clock.now_s() + 1.5)
    (lost,) = (log for log in desk.all_of(Log) if log.kind == "rank_lost")
    assert lost.fields["hit_s"] == -1.5


def test_a_death_that_nobody_announced_is_measured_from_when_its_end_was_seen():
    """What an operator said of it before is earlier, and counts."""
    for hit_s, expected_s in ((None, -0.5), (-2.0, -2.0)):
        desk = Desk().run()
        if hit_s is not None:
            desk.coordinator.hit(3, hit_s)
        desk.say(3, ExecutorExited(code=-9, last_words="", seen_s=-0.5))
        assert [incident.hit_s for incident in desk.coordinator.incidents] == [expected_s]


def test_a_supervisor_whose_end_was_seen_has_a_detection_time_and_one_that_never_came_has_none():
    """Its monitor says when, where it does know."""
    for seen_s in (-0.25, None):
        desk = Desk().run()
        desk.do(desk.coordinator.disconnected(3, desk.clock.now_s(), seen_s=seen_s))
        assert [incident.hit_s for incident in desk.coordinator.incidents] == [seen_s]
