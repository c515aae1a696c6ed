"""What a rank does with its snapshots: goes back to one, begins from one, keeps the right ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import assert_same_bits
from layouts import MODEL, one_stage
from test_state import JOB, PLAN, PROGRAM, commit_of, copies, do_step, tensors_of

from resihp.config.schema import Auto
from resihp.errors import CommError, UserError
from resihp.executor.before import Before
from resihp.executor.snapshots import slots as slots_module
from resihp.executor.snapshots.reader import sealed_in
from resihp.executor.snapshots.writer import Snapshots
from resihp.executor.state import TrainState, initial_holding, shard_hashes
from resihp.ir.expand import expand
from resihp.ir.printer import print_plan
from resihp.wire.messages import Commit, Sealed

RANK = 1


def snapshots_in(folder: Path, every: int | Auto = 1) -> Snapshots:
    return Snapshots(folder, RANK, every)


def begun(folder: Path, every: int | Auto = 1) -> TrainState:
    """In generation 1, before its first step, with a sealed snapshot of that."""
    folder.mkdir(exist_ok=True)
    state = TrainState(JOB, snapshots_in(folder, every))
    state.adopt(0, Commit(version=0, updates=0, record=None))
    state.prepare(1, initial_holding(MODEL, JOB, PROGRAM))
    state.secure()
    state.go()
    return state


def before() -> Before:
    return Before(MODEL, JOB, print_plan(PLAN), RANK)


def sealed(state: TrainState) -> list[tuple[int, int]]:
    return [(each.generation, each.version) for each in state.sealed()]


def test_every_version_that_is_due_is_kept(tmp_path: Path):
    """The last two of them; between them nothing is written."""
    state = begun(tmp_path, every=2)
    assert sealed(state) == [(1, 0)]
    seen = list[list[tuple[int, int]]]()
    for _ in range(4):
        do_step(state)
        state.seal()
        seen.append(sorted(sealed(state)))
    assert seen == [[(1, 0)], [(1, 0), (1, 2)], [(1, 0), (1, 2)], [(1, 2), (1, 4)]]
    assert state.sealed()[0] == Sealed(rank=RANK, generation=1, version=4, updates=4)


def test_what_all_agreed_on_is_kept(tmp_path: Path):
    """The gap counts from the newest snapshot, and may be another one after each step."""
    state = begun(tmp_path, every="auto")
    for gap in (2, 2, 1, 3, 3, 2):
        do_step(state, gap=gap)
        state.seal()
    assert sorted(sealed(state)) == [(1, 3), (1, 6)]


def test_who_rolls_forward_keeps_what_the_others_keep(tmp_path: Path):
    """The record says so, whatever this rank would have kept."""
    ahead, behind = begun(tmp_path / "a", every="auto"), begun(tmp_path / "b", every="auto")
    do_step(ahead, gap=1)
    do_step(behind, until="reduced")
    behind.adopt(1, commit_of(ahead))
    assert sorted(sealed(ahead)) == sorted(sealed(behind)) == [(1, 0), (1, 1)]


def test_going_back_is_bitwise(tmp_path: Path):
    """Parameters, moments, the count of updates and what the next step makes of them."""
    state, straight = begun(tmp_path / "a"), begun(tmp_path / "b")
    do_step(state)
    do_step(straight)
    commit, there = commit_of(state), copies(state)
    do_step(state, skipped=False)
    state.adopt(1, commit)
    assert_same_bits(tensors_of(state), there)
    assert (state.version, state.voted, state.updates) == (1, 1, 1)
    for each in (state, straight):
        do_step(each)
    assert_same_bits(tensors_of(state), tensors_of(straight))


@pytest.mark.parametrize("until", ["reduced", "voted"])
def test_a_step_that_nobody_else_can_follow_is_forgotten(tmp_path: Path, until: str):
    """Its gradients and its vote with it: the version before has not changed."""
    state = begun(tmp_path)
    do_step(state)
    commit, there = commit_of(state), copies(state)
    do_step(state, until=until)
    state.adopt(1, commit)
    assert_same_bits(tensors_of(state), there)
    assert (state.version, state.voted, state.record) == (1, 1, commit.record)
    state.prepare(2, state.current)
    state.go()
    do_step(state)


def test_a_rank_that_was_started_again_begins_from_its_own_snapshot(tmp_path: Path):
    """As if it had never been away."""
    state = begun(tmp_path)
    for _ in range(3):
        do_step(state)
    state.seal()
    again = TrainState(JOB, snapshots_in(tmp_path))
    again.adopt(1, commit_of(state), before().room)
    assert_same_bits(tensors_of(again), tensors_of(state))
    for each in (state, again):
        each.prepare(2, each.current)
        each.go()
        do_step(each)
    assert_same_bits(tensors_of(again), tensors_of(state))


def test_without_a_snapshot_of_that_version_it_holds_nothing(tmp_path: Path):
    """It takes over the numbers, as a standby rank does."""
    state = begun(tmp_path)
    do_step(state)
    state.seal()
    again = TrainState(JOB, snapshots_in(tmp_path))
    again.adopt(1, Commit(version=7, updates=7, record=None), before().room)
    assert again.current is None
    assert (again.version, again.updates) == (7, 7)


def test_a_snapshot_that_is_not_whole_is_an_error_and_then_gone(tmp_path: Path):
    """So that the next settlement does without it."""
    state = begun(tmp_path)
    do_step(state)
    commit = commit_of(state)
    do_step(state)
    state.seal()
    (path,) = [each.path for each in sealed_in(tmp_path) if each.manifest.version == 1]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CommError, match="no snapshot of version 1"):
        state.adopt(1, commit)
    assert sealed(state) == [(1, 2)]


def test_what_was_gone_back_to_stays_until_the_next_layout_is_sealed(tmp_path: Path):
    """A second loss while the next generation opens still finds it."""
    state = begun(tmp_path)
    do_step(state)
    commit = commit_of(state)
    do_step(state)
    for generation in (2, 3):
        state.adopt(1, commit)
        state.prepare(generation, state.current)
        state.secure()
        assert sorted(sealed(state)) == [(1, 1), (generation, 1)]


def test_a_lost_ranks_state_is_read_by_another(tmp_path: Path):
    """Of the layout and version that all settled on, and of no other."""
    state = begun(tmp_path)
    do_step(state)
    state.seal()
    giver = Snapshots(tmp_path, 0, 1)
    read = Before(MODEL, JOB, print_plan(PLAN), 0).lost(giver, 1, 1, RANK)
    assert state.current is not None
    assert shard_hashes(MODEL, read, 2) == shard_hashes(MODEL, state.current, 2)
    for generation, version in ((1, 2), (2, 1)):
        with pytest.raises(CommError, match="no whole snapshot of rank 1"):
            before().lost(giver, generation, version, RANK)


def test_a_job_without_room_for_snapshots_is_refused_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the key; a generation later, the rank goes on without them."""

    def no_room(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(slots_module.os, "posix_fallocate", no_room)
    with pytest.raises(UserError, match="snapshot_every = 0"):
        begun(tmp_path)
    monkeypatch.undo()
    state = begun(tmp_path)
    monkeypatch.setattr(slots_module.os, "posix_fallocate", no_room)
    state.adopt(1, commit_of(state))
    whole = expand(one_stage({0: 1, 1: 2}, 2, 2), 0)
    state.prepare(2, initial_holding(MODEL, JOB, whole))
    state.secure()
    state.go()
    assert sealed(state) == [(1, 0)]
    assert state.snapshots is not None
    assert "No space" in state.snapshots.refusal
