"""Where the last holders of a shard are lost: from their snapshots, one step back if it must be."""

from __future__ import annotations

from pathlib import Path

import msgspec
from coordinator_cases import Desk, exited, job_of, ready, record_of, settled

from resihp.config import RejoinConfig
from resihp.ir.model import Restore
from resihp.ir.parser import parse
from resihp.monitor.actions import StepCommitted, StepsTakenBack
from resihp.monitor.coordinator import Phase
from resihp.monitor.run_dir import RunDir
from resihp.wire.messages import Close, ExecutorStarted, Respawn, Sealed, Settled, StepDone


def sealed(rank: int, version: int, generation: int = 1) -> Sealed:
    return Sealed(rank=rank, generation=generation, version=version, updates=version)


def told(generation: int, version: int, *snapshots: Sealed) -> Settled:
    return msgspec.structs.replace(settled(generation, version, layouts=(1,)), snapshots=snapshots)


def after_two_losses(desk: Desk | None = None) -> Desk:
    """Ranks 0 and 2, the first halves of both replicas, die two steps in."""
    desk = (desk or Desk()).run()
    desk.step(0)
    desk.step(1)
    desk.say(0, exited())
    desk.say(2, exited())
    return desk


def test_a_snapshot_of_the_newest_version_costs_no_step():
    """The plan restores what both lost ranks held, read by the live one that it names."""
    desk = after_two_losses()
    for rank in (1, 3):
        desk.say(rank, told(desk.generation, 2, sealed(0, 2), sealed(2, 1)))
    deploy = desk.last_deploy()
    assert (deploy.commit.version, deploy.commit.record) == (2, record_of(1))
    lines = [each for each in parse(deploy.plan).plan.reconfigure if isinstance(each, Restore)]
    assert {line.source for line in lines} == {0}
    assert {line.giver for line in lines} <= {1, 3}
    assert desk.all_of(StepsTakenBack) == []


def test_a_step_whose_result_is_nowhere_whole_is_done_again_once():
    """Its rows are taken back, and a late report of it does not count."""
    desk = after_two_losses()
    for rank in (1, 3):
        own = sealed(rank, 1), sealed(rank, 2)
        desk.say(rank, told(desk.generation, 2, *own, sealed(0, 1), sealed(2, 1)))
    deploy = desk.last_deploy()
    assert (deploy.commit.version, deploy.commit.record) == (1, record_of(0))
    assert desk.all_of(StepsTakenBack) == [StepsTakenBack(1)]
    desk.say(1, StepDone(generation=1, record=record_of(1)))
    desk.join()
    desk.step(1)
    steps = [action.record.step for action in desk.all_of(StepCommitted)]
    assert steps == [0, 1, 1]
    assert [record.step for record in desk.coordinator.records] == [0, 1]


def test_a_snapshot_that_comes_after_all_went_back_is_no_source():
    """[T9] A rank that was cut off saw the vote late and sealed what the others do again."""
    desk = after_two_losses()
    for rank in (1, 3):
        own = sealed(rank, 1), sealed(rank, 2)
        desk.say(rank, told(desk.generation, 2, *own, sealed(0, 1), sealed(2, 1)))
    assert desk.last_deploy().commit.version == 1
    desk.say(1, exited())
    late = sealed(0, 1), sealed(0, 2)
    desk.say(3, told(desk.generation, 1, sealed(3, 1), sealed(3, 2), *late))
    deploy = desk.last_deploy()
    assert (deploy.base, deploy.commit.version) == (1, 1)
    assert [record.step for record in desk.coordinator.records] == [0]


def restarting() -> Desk:
    """A job whose lost ranks are started again."""
    return Desk(msgspec.structs.replace(job_of(), rejoin=RejoinConfig(restarts=3)))


def all_killed(desk: Desk) -> None:
    """Every executor dies, one after the other; each is started again and gets ready."""
    ranks = desk.alive
    for rank in ranks:
        desk.say(rank, exited())
    assert [rank for rank, _ in desk.sent(Respawn)] == ranks
    assert desk.phase is Phase.SETTLING
    for rank in ranks:
        desk.say(rank, ExecutorStarted(pid=10 + rank))
        desk.say(rank, ready())
    assert {r for r, m in desk.sent(Close) if m.generation == desk.generation} == set(ranks)


def again(desk: Desk, *snapshots: Sealed) -> Settled:
    """What a fresh executor says."""
    return msgspec.structs.replace(told(desk.generation, 0, *snapshots), layouts=(0,))


def test_all_executors_are_killed_at_once_and_come_back_with_their_snapshots():
    """The same plan goes on, one step back where both holders of a shard were killed in a copy."""
    desk = restarting().run()
    desk.step(0)
    desk.step(1)
    plan = desk.last_deploy().plan
    all_killed(desk)
    for rank in desk.alive:
        newest = 1 if rank in (0, 2) else 2
        desk.say(rank, again(desk, sealed(rank, 1), sealed(rank, newest)))
    deploy = desk.last_deploy()
    assert (deploy.plan, deploy.base, deploy.commit.version) == (plan, 1, 1)
    assert desk.alive == [0, 1, 2, 3]
    desk.join()
    desk.step(1)
    assert [record.step for record in desk.coordinator.records] == [0, 1]
    assert desk.end is None


def test_all_are_back_and_nobody_has_a_snapshot():
    """Then nothing is left, and the job ends with its exit code for that."""
    desk = restarting().run()
    desk.step(0)
    all_killed(desk)
    for rank in desk.alive:
        desk.say(rank, again(desk))
    assert desk.end is not None
    assert desk.end.exit_code == 4


def test_one_that_comes_back_without_a_snapshot_counts_as_lost():
    """What it held is read out of its peers by those that have theirs."""
    desk = restarting().run()
    desk.step(0)
    all_killed(desk)
    for rank in (0, 1, 3):
        desk.say(rank, again(desk, sealed(rank, 1)))
    desk.say(2, again(desk, sealed(2, 0)))
    assert desk.alive == [0, 1, 3]
    assert parse(desk.last_deploy().plan).plan.lost == (2,)
    desk.join()
    assert desk.phase is Phase.RUNNING


def test_survivors_wait_for_a_shard_that_only_a_rank_that_is_started_again_can_read():
    """Its node has no other rank alive, so nobody else sees the snapshot."""
    desk = after_two_losses(restarting())
    for rank in (1, 3):
        desk.say(rank, told(desk.generation, 2, sealed(rank, 2)))
    assert desk.phase is Phase.SETTLING
    assert desk.end is None
    for rank in (0, 2):
        desk.say(rank, ready())
    for rank in (0, 2):
        desk.say(rank, again(desk, sealed(rank, 2)))
    assert desk.alive == [0, 1, 2, 3]
    assert desk.last_deploy().commit.version == 2


def test_without_restarts_the_last_loss_ends_the_job():
    """Nobody would come back."""
    desk = Desk().run()
    for rank in desk.alive:
        desk.say(rank, exited())
    assert desk.end is not None
    assert desk.end.exit_code == 4


def test_rows_of_steps_that_are_done_again_are_cut_off(tmp_path: Path):
    """The files go on after the last step that counts."""
    run_dir = RunDir(tmp_path)
    for step in range(4):
        run_dir.step(record_of(step), 1)
    run_dir.take_back(2)
    run_dir.step(record_of(2), 2)
    run_dir.take_back(3)
    for name in ("metrics", "ledger"):
        rows = (tmp_path / f"{name}.jsonl").read_bytes().splitlines()
        assert [msgspec.json.decode(row)["step"] for row in rows] == [0, 1, 2]
    run_dir.close()
