"""Saved versions as the coordinator sees them: parts, going back, a save before the end."""

from __future__ import annotations

import msgspec
import pytest
from coordinator_cases import CachedPlanner, Desk, exited, job_of, ready, record_of, settled
from saving_cases import POSITION, RUN, desk_of, part, save, saved

from resihp.checkpoint.versions import version_name
from resihp.config import RejoinConfig, StateConfig
from resihp.errors import NoFeasiblePlan
from resihp.monitor.actions import (
    CompleteVersion,
    DropVersion,
    End,
    Say,
    StepCommitted,
    StepsTakenBack,
)
from resihp.monitor.checkpoints import SavePlace
from resihp.monitor.coordinator import Phase
from resihp.monitor.planner import VerifiedPlan
from resihp.wire.messages import (
    Close,
    Deploy,
    ExecutorStarted,
    Finished,
    Respawn,
    Save,
    SaveFailed,
    Stop,
    VersionRefused,
)


class Hopeless(CachedPlanner):
    """Has no plan after a loss."""

    def after_loss(self, previous: VerifiedPlan, *args: object, **stored: object) -> VerifiedPlan:
        raise NoFeasiblePlan("too little memory")


def lose_all_of_member(desk: Desk, step: int) -> None:
    """Both holders of chunk 1 die at once; the others settle at `step`."""
    desk.say(1, exited())
    desk.say(3, exited())
    desk.settle(version=step)


# --- parts


def test_a_version_is_completed_once_every_member_wrote_its_part():
    """With the manifest of all parts, and not before the last one."""
    desk = desk_of().run()
    for step in (0, 1):
        desk.step(step)
    for rank in (0, 1, 2):
        desk.say(rank, part(desk, 2))
    assert not desk.all_of(CompleteVersion)
    desk.say(3, part(desk, 2))
    (order,) = desk.all_of(CompleteVersion)
    assert [file.rank for file in order.manifest.parts] == [0, 1, 2, 3]
    assert (order.manifest.step, order.manifest.updates) == (2, 2)
    assert order.manifest.position == POSITION


def test_parts_that_are_said_again_complete_nothing_twice():
    """Supervisors repeat them to a monitor or a coordinator that is new."""
    desk = desk_of().run()
    for step in (0, 1):
        desk.step(step)
    desk.say_all(part(desk, 2))
    desk.say_all(part(desk, 2))
    save(desk, 2)
    desk.say_all(part(desk, 2))
    assert len(desk.all_of(CompleteVersion)) == 1


def test_a_save_in_flight_is_dropped_with_its_generation():
    """[T23] A rank dies before the last part: the version is removed, late parts count nothing."""
    desk = desk_of().run()
    for step in (0, 1):
        desk.step(step)
    for rank in (0, 1, 2):
        desk.say(rank, part(desk, 2))
    desk.say(3, exited())
    assert desk.all_of(DropVersion) == [DropVersion(version_name(2, RUN, 1))]
    desk.say(2, part(desk, 2, generation=1))
    assert not desk.all_of(CompleteVersion)


def test_a_part_that_fails_is_told_once_and_training_goes_on():
    """[T22] A full disk on two ranks: one line, one removal, no stop."""
    desk = desk_of().run()
    name = version_name(2, RUN, 1)
    desk.say(0, part(desk, 2))
    for rank in (1, 2):
        desk.say(rank, SaveFailed(generation=1, name=name, why="no space left"))
    desk.say(3, part(desk, 2))
    assert desk.all_of(DropVersion) == [DropVersion(name)]
    assert desk.phase is Phase.RUNNING
    assert not desk.all_of(CompleteVersion)


def said(desk: Desk) -> list[str]:
    """Lines about versions that were not saved."""
    return [action.line for action in desk.all_of(Say) if "not saved" in action.line]


def test_a_disk_that_stays_full_is_told_once_and_counted():
    """[T22] The first version by name, then how many: once one is saved again, or at the end."""
    desk = desk_of().run()

    def fill(steps: range) -> None:
        for step in steps:
            rank, name = step % 4, version_name(step, RUN, 1)
            why = f"/d/{name}/part-0000{rank}.data: No space left on device"
            desk.say(rank, SaveFailed(generation=1, name=name, why=why))

    fill(range(2, 7))
    (first,) = said(desk)
    assert first.startswith(f"version {version_name(2, RUN, 1)} was not saved: rank 2: /d/")
    desk.step(0)
    save(desk, 7)
    assert said(desk)[1:] == ["4 more versions were not saved for the same reason"]
    fill(range(8, 10))
    assert len(said(desk)) == 3
    desk.do(desk.coordinator.over("stopped by SIGTERM", 143, desk.clock.now_s()))
    assert said(desk)[3:] == ["1 more version was not saved for the same reason"]


# --- resuming


def test_a_job_resumes_from_the_newest_version():
    """Everybody is told which, and the first step is the one after it."""
    desk = desk_of(saved(6), saved(4), resume=True)
    desk.say_all(ready())
    deploy = desk.last_deploy()
    assert deploy.commit.saved == saved(6).name
    assert (deploy.commit.version, deploy.commit.updates, deploy.base) == (6, 6, 0)
    desk.join()
    desk.step(6)
    assert [action.record.step for action in desk.all_of(StepCommitted)] == [6]


@pytest.mark.parametrize(
    "change", [{"dataset": "e"}, {"seed": 1}, {"tokens": 128}, {"num_microbatches": 8}]
)
def test_a_version_whose_data_would_not_go_on_is_refused(change: dict[str, object]):
    """Other text, seed or batch: samples would be lost or doubled, so the job ends with 2."""
    desk = desk_of(saved(6, **change), resume=True)
    desk.say_all(ready())
    assert desk.end is not None
    assert desk.end.exit_code == 2
    assert not desk.sent(Deploy)


def test_a_version_that_a_rank_refuses_is_taken_by_nobody():
    """[T21] The decision is the coordinator's: all go to the one before, or the job ends."""
    desk = desk_of(saved(6), saved(4), resume=True)
    desk.say_all(ready())
    desk.say(2, VersionRefused(generation=1, name=saved(6).name, why="part 3 is damaged"))
    assert desk.sent(Close)[-4:] == [(rank, Close(generation=2)) for rank in range(4)]
    desk.say_all(settled(2, version=6, layouts=(0,)))
    assert desk.last_deploy().commit.saved == saved(4).name
    desk.say(0, VersionRefused(generation=2, name=saved(4).name, why="part 0 is damaged"))
    desk.say_all(settled(3, version=4, layouts=(0,)))
    assert desk.end is not None
    assert "damaged" in desk.end.reason


def test_a_version_of_another_model_is_not_gone_back_from():
    """It is intact, and so are those before it, of the same model: the job ends with 2."""
    desk = desk_of(saved(6), saved(4), resume=True)
    desk.say_all(ready())
    name, why = saved(6).name, "it is of another model"
    desk.say(2, VersionRefused(generation=1, name=name, why=why, is_other_model=True))
    assert desk.end is not None
    assert (desk.end.exit_code, desk.end.reason) == (2, why)
    assert not desk.sent(Close)


def test_a_version_that_was_refused_is_not_counted_on():
    """[T21] Pruning is told of it, and of the version that all begin with until they run."""
    desk = desk_of(saved(6), saved(4), resume=True)
    desk.say_all(ready())
    desk.say(2, VersionRefused(generation=1, name=saved(6).name, why="part 3 is damaged"))
    desk.say_all(settled(2, version=6, layouts=(0,)))
    desk.run()
    for step in (4, 5):
        desk.step(step)
    save(desk, 6)
    (order,) = desk.all_of(CompleteVersion)
    assert order.spared == (saved(6).name,)


# --- going back


def test_a_shard_without_a_holder_sends_all_back_to_the_newest_version():
    """[T11] Steps after it are taken back; everybody reads it, whatever it holds."""
    desk = desk_of(job=job_of(tp=2, pp=1, dp=2, steps=9)).run()
    for step in range(4):
        desk.step(step)
    name = save(desk, 2)
    lose_all_of_member(desk, 4)
    deploy = desk.last_deploy()
    assert (deploy.commit.saved, deploy.commit.version, deploy.base) == (name, 2, 0)
    assert "load layers=" in deploy.plan
    assert desk.all_of(StepsTakenBack) == [StepsTakenBack(2)]
    desk.join()
    desk.step(2)
    assert desk.coordinator.records[-1].step == 2
    assert desk.phase is Phase.RUNNING


def test_where_nobody_is_left_those_that_come_back_begin_with_the_disk():
    """[T11] Without snapshots nothing else is left of the state, and it is enough."""
    job = msgspec.structs.replace(
        job_of(tp=1, pp=1, dp=2, steps=9),
        rejoin=RejoinConfig(restarts=3),
        state=StateConfig(snapshot_every=0),
    )
    desk = desk_of(saved(4), job=job).run()
    for rank in (0, 1):
        desk.say(rank, exited())
    assert desk.end is None
    assert [rank for rank, _ in desk.sent(Respawn)] == [0, 1]
    for rank in (0, 1):
        desk.say(rank, ExecutorStarted(pid=7 + rank))
        desk.say(rank, ready())
        desk.say(rank, settled(desk.generation, layouts=(0,)))
    assert desk.last_deploy().commit.saved == saved(4).name


def test_who_takes_over_counts_on_what_is_saved_by_then():
    """It may have been started long before it leads, while others completed and pruned versions."""
    desk = desk_of(saved(2), job=job_of(tp=2, pp=1, dp=2, steps=9))
    desk.coordinator.remember_versions([saved(6), saved(4)])
    desk.take_over(desk.entry(3, base=2, version=6), [record_of(step) for step in range(6)])
    desk.say_all(ready())
    lose_all_of_member(desk, 6)
    assert desk.last_deploy().commit.saved == saved(6).name


def test_a_loss_while_all_go_back_goes_back_again():
    """Nobody holds anything then, so nobody is fenced for what it holds."""
    desk = desk_of(job=job_of(tp=1, pp=1, dp=4, steps=9)).run()
    for step in range(4):
        desk.step(step)
    save(desk, 4)
    for rank in (0, 1, 2):
        desk.say(rank, exited())
    desk.settle(version=4)
    assert not desk.last_deploy().commit.saved  # one holder is enough
    desk = desk_of(saved(4), saved(2), job=job_of(tp=2, pp=1, dp=2, steps=9)).run()
    lose_all_of_member(desk, 0)
    assert desk.last_deploy().commit.saved == saved(4).name
    desk.say(2, exited())
    desk.say(0, settled(desk.generation, version=9, layouts=(7,)))
    assert desk.last_deploy().commit.saved == saved(4).name


# --- ends


def test_a_signal_saves_before_the_job_ends():
    """[T13] All leave, write what they hold, and are told to stop once it is complete."""
    desk = desk_of().run()
    desk.step(0)
    desk.do(desk.coordinator.stop("stopped by SIGTERM", 143, desk.clock.now_s()))
    assert desk.end is None
    desk.settle(version=1)
    orders = desk.sent(Save)
    assert [rank for rank, _ in orders] == [0, 1, 2, 3]
    assert {order.commit.version for _, order in orders} == {1}
    save(desk, 1)
    assert desk.end is not None
    assert desk.end.exit_code == 143
    assert f"newest saved: {version_name(1, RUN, 2)}" in desk.end.reason
    assert len(desk.sent(Stop)) == 4


def test_a_wish_to_end_that_is_told_again_is_one_wish():
    """By the monitor of each node, and by each worker under torchrun: the state is saved all the
    same, and the first one's exit code counts."""
    desk = desk_of().run()
    desk.step(0)
    for number in (143, 143, 130):
        desk.do(desk.coordinator.stop("stopped by a signal", number, desk.clock.now_s()))
    desk.settle(version=1)
    desk.do(desk.coordinator.stop("stopped by a signal", 143, desk.clock.now_s()))
    assert desk.end is None
    save(desk, 1)
    assert desk.end is not None
    assert desk.end.exit_code == 143


def test_a_job_that_another_coordinator_ended_is_over_at_once():
    """A monitor says so: there is nobody left to save anything."""
    desk = desk_of().run()
    desk.step(0)
    desk.do(desk.coordinator.over("finished", 0, desk.clock.now_s()))
    assert desk.end == End(0, "finished")


def test_what_is_saved_already_is_not_saved_again():
    """The newest version is that of the settled step."""
    desk = desk_of().run()
    desk.step(0)
    save(desk, 1)
    desk.do(desk.coordinator.stop("stopped by SIGTERM", 143, desk.clock.now_s()))
    desk.settle(version=1)
    assert not desk.sent(Save)
    assert desk.end is not None


@pytest.mark.parametrize("trouble", ["", "no space left"])
def test_a_version_that_is_completed_meanwhile_is_not_the_last_one(trouble: str):
    """It was begun while training went on: the job does not end before its last step is saved."""
    desk = desk_of().run()
    for step in range(3):
        desk.step(step)
    name = version_name(2, RUN, desk.generation)
    desk.say_all(part(desk, 2))
    desk.do(desk.coordinator.stop("stopped by SIGTERM", 143, desk.clock.now_s()))
    desk.settle(version=3)
    desk.do(desk.coordinator.completed(name, trouble, [], desk.clock.now_s()))
    assert desk.end is None
    save(desk, 3)
    assert desk.end is not None
    assert f"newest saved: {version_name(3, RUN, 2)}" in desk.end.reason
    assert "is not saved" not in desk.end.reason


@pytest.mark.parametrize("how", ["a part fails", "the disk refuses", "it takes for ever"])
def test_a_save_before_the_end_that_fails_does_not_hold_it_up(how: str):
    """The reason says that the state is lost, and what the newest version is."""
    desk = desk_of().run()
    desk.step(0)
    desk.do(desk.coordinator.stop("stopped by SIGTERM", 143, desk.clock.now_s()))
    desk.settle(version=1)
    if how == "a part fails":
        name = version_name(1, RUN, 2)
        desk.say(2, SaveFailed(generation=2, name=name, why="no space left"))
    elif how == "the disk refuses":
        save(desk, 1, trouble="no space left")
    else:
        desk.wait(desk.timing.save_s + 1)
    assert desk.end is not None
    assert desk.end.exit_code == 143
    assert "step 1 is not saved" in desk.end.reason
    assert "no version is saved" in desk.end.reason


def test_a_rank_that_dies_while_it_saves_is_done_without():
    """The others hold everything: they settle and write again."""
    desk = desk_of().run()
    desk.step(0)
    desk.do(desk.coordinator.stop("stopped by SIGTERM", 143, desk.clock.now_s()))
    desk.settle(version=1)
    desk.say(0, part(desk, 1))
    desk.say(3, exited())
    desk.settle(version=1)
    assert [rank for rank, order in desk.sent(Save) if order.generation == 3] == [0, 1, 2]
    save(desk, 1)
    assert desk.end is not None
    assert desk.end.exit_code == 143


def test_an_order_to_save_is_repeated_to_who_may_not_have_it():
    """The connection to a node was lost meanwhile: whoever has not reported is told again."""
    desk = desk_of().run()
    desk.step(0)
    desk.do(desk.coordinator.stop("stopped by SIGTERM", 143, desk.clock.now_s()))
    desk.settle(version=1)
    desk.say(0, part(desk, 1))
    desk.do(desk.coordinator.reached([0, 1], desk.clock.now_s()))
    assert [rank for rank, _ in desk.sent(Save)] == [0, 1, 2, 3, 1]


def test_no_plan_saves_what_survivors_hold():
    """[T12] All shards are alive and yet no plan can go on: saved, and 4."""
    job = job_of(tp=1, pp=1, dp=2, steps=9)
    desk = Desk(job, Hopeless(job), SavePlace("/d", RUN, (), ())).run()
    desk.step(0)
    desk.say(1, exited())
    desk.settle(version=1)
    assert [rank for rank, _ in desk.sent(Save)] == [0]
    save(desk, 1)
    assert desk.end is not None
    assert desk.end.exit_code == 4
    assert "no plan can carry" in desk.end.reason
    assert "newest saved" in desk.end.reason


def test_a_shard_lost_without_any_version_ends_the_job():
    """Nothing to go back to, nothing whole to save: 4, and the reason says both."""
    desk = desk_of(job=job_of(tp=2, pp=1, dp=1, steps=9)).run()
    desk.step(0)
    desk.say(1, exited())
    desk.settle(version=1)
    assert desk.end is not None
    assert desk.end.exit_code == 4
    assert "step 1 is not saved: no live rank holds all of layers" in desk.end.reason


def test_the_end_of_the_job_needs_no_save():
    """All steps are done: 0."""
    desk = desk_of(job=job_of(steps=1)).run()
    desk.step(0)
    desk.say_all(Finished(generation=1))
    assert desk.end is not None
    assert desk.end.exit_code == 0
    assert record_of(0).step == 0
