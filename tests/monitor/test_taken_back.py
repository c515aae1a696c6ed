"""Where the last holders of a shard are lost: from their snapshots, one step back if it must be."""

from __future__ import annotations

from pathlib import Path

import msgspec
from coordinator_cases import Desk, exited, record_of, settled

from resihp.ir.model import Restore
from resihp.ir.parser import parse
from resihp.monitor.actions import StepCommitted, StepsTakenBack
from resihp.monitor.coordinator import Phase
from resihp.monitor.run_dir import RunDir
from resihp.wire.messages import Fence, Sealed, Settled, StepDone


def sealed(rank: int, version: int, generation: int = 1) -> Sealed:
    return Sealed(rank=rank, generation=generation, version=version, updates=version)


def told(generation: int, version: int, *snapshots: Sealed) -> Settled:
    return msgspec.structs.replace(settled(generation, version, layouts=(1,)), snapshots=snapshots)


def after_two_losses() -> Desk:
    """Ranks 0 and 2, the first halves of both replicas, die two steps in."""
    desk = Desk().run()
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


def test_a_rank_that_was_started_again_and_holds_nothing_is_fenced():
    """It counts as lost; the others settle without it."""
    desk = Desk().run()
    desk.step(0)
    desk.say(0, exited())
    generation = desk.generation
    for rank in (1, 2):
        desk.say(rank, told(generation, 1))
    again = msgspec.structs.replace(told(generation, 0, sealed(3, 0)), layouts=(0,))
    desk.say(3, again)
    assert [rank for rank, _ in desk.sent(Fence)] == [3]
    assert desk.phase is Phase.SETTLING


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
