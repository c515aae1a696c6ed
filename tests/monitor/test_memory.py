"""What a coordinator that takes over knows of what those before it saw."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import msgspec
import pytest
from coordinator_cases import Desk, exited, job_of, ready, settled

from resihp.checkpoint.manifest import Position
from resihp.compiler.adaptation.hysteresis import Record
from resihp.config import CheckpointConfig, RejoinConfig
from resihp.monitor.actions import Log, Say
from resihp.monitor.checkpoints import SavedVersion, SavePlace
from resihp.monitor.coordinator import Phase
from resihp.monitor.memory import Memory, memory_of
from resihp.wire.messages import (
    Beat,
    ExecutorExited,
    ExecutorStarted,
    Fence,
    Request,
    Respawn,
    VersionRefused,
)

GOOD = 3
PIDS = count(1)
BEAT = Beat(step=0, instruction=0)


class Line:
    """Coordinators of one job, one after the other; each reads what those before it told."""

    def __init__(self, restarts: int) -> None:
        rejoin = RejoinConfig(restarts=restarts, good_iterations=GOOD)
        self.job = msgspec.structs.replace(job_of(1, 2, 2, steps=1000), rejoin=rejoin)
        self.desk = Desk(self.job).run()
        self.num_respawns = 0
        self.said: list[str] = []
        self._rows: list[bytes] = []
        self._entry = self.desk.entry()

    def hand_over(self, **found: object) -> Desk:
        """The one that leads dies, and the next one finds the generation running; `found`: what
        its entry says beside."""
        before = self.desk
        self._rows += rows_of(before)
        self.num_respawns += len(before.sent(Respawn))
        self.said += [say.line for say in before.all_of(Say)]
        records = before.coordinator.records
        entry = before.proposed()[-1] if before.proposed() else self._entry
        self._entry = msgspec.structs.replace(entry, **found)
        self.desk = desk = Desk(self.job)
        desk.clock.advance(before.clock.now_s())
        desk.coordinator.remember(memory_of(self._rows, len(records)))
        desk.take_over(self._entry, records)
        desk.say_all(ready())
        desk.say_all(msgspec.structs.replace(BEAT, generation=desk.generation, runs=True))
        assert desk.phase is Phase.RUNNING
        return desk


def rows_of(desk: Desk) -> list[bytes]:
    """Of `events.jsonl`."""
    logs = desk.all_of(Log)
    return [msgspec.json.encode({"event": log.kind, "at_s": 1.0, **log.fields}) for log in logs]


def events(*rows: tuple[str, Mapping[str, object]]) -> Memory:
    told = [{"event": kind, "at_s": 1.0, **fields} for kind, fields in rows]
    return memory_of(map(msgspec.json.encode, told), 0)


def lose(desk: Desk, rank: int) -> None:
    desk.say(rank, exited())
    desk.settle(len(desk.coordinator.records))
    desk.join()
    assert desk.phase is Phase.RUNNING


def run_steps(desk: Desk, num: int) -> None:
    for _ in range(num):
        desk.step(len(desk.coordinator.records))


def grow(desk: Desk) -> None:
    """All yield as they were asked to, and the larger plan completes a step."""
    plan, version = desk.coordinator.steady_plan, len(desk.coordinator.records)
    assert plan is not None
    generation = desk.generation + 1
    for rank in plan.active_ranks:
        desk.say(rank, settled(generation, version))
    for rank in desk.closed():
        desk.say(rank, settled(generation, version))
    desk.join()
    run_steps(desk, 1)


def start(desk: Desk, rank: int) -> int:
    """A new executor, with its number."""
    pid = next(PIDS)
    desk.say(rank, ExecutorStarted(pid=pid))
    return pid


def crash(desk: Desk, rank: int, pid: int) -> None:
    desk.say(rank, ExecutorExited(code=-9, last_words="", pid=pid))


def wait_long(desk: Desk) -> None:
    """Longer than any pause before a start; steps are made meanwhile."""
    for _ in range(6):
        run_steps(desk, 1)
        desk.wait(20.0, beats=BEAT)


@pytest.mark.parametrize("dies_after", ["order", "start", "end"])
def test_a_rank_that_crashes_at_once_has_one_budget_under_all_coordinators(dies_after: str):
    """[T10] Wherever between an order to start and the end of what was started each one dies."""
    line = Line(restarts=3)
    lose(line.desk, 3)
    for _ in range(8):
        desk, pid = line.desk, next(PIDS)
        has_order = bool(desk.sent(Respawn))
        if dies_after == "order":
            desk = line.hand_over()
        if has_order:
            desk.say(3, ExecutorStarted(pid=pid))
        if dies_after == "start":
            desk = line.hand_over()
        crash(desk, 3, pid if has_order else 0)
        if dies_after == "end":
            desk = line.hand_over()
            crash(desk, 3, pid if has_order else 0)  # its supervisor says it again
        wait_long(desk)
    line.hand_over()
    assert line.num_respawns == 3
    assert sum("rank 3 is not started again: 3 starts" in said for said in line.said) == 1
    assert line.desk.phase is Phase.RUNNING


def test_a_step_that_a_rank_took_part_in_gives_its_budget_back_under_all_coordinators():
    line = Line(restarts=1)
    lose(line.desk, 3)
    start(line.desk, 3)
    line.desk.say(3, ready())
    run_steps(line.desk, GOOD)
    grow(line.desk)
    assert line.hand_over().alive == [0, 1, 2, 3]
    lose(line.desk, 3)
    assert [rank for rank, _ in line.desk.sent(Respawn)] == [3]


def test_starts_by_others_are_remembered_too():
    """A launcher starts supervisors that begin by themselves."""
    line = Line(restarts=2)
    line.desk.gone(3)
    line.desk.settle()
    line.desk.join()
    for _ in range(2):
        assert not line.desk.sent(Fence)
        pid = start(line.desk, 3)
        crash(line.hand_over(), 3, pid)
    start(line.desk, 3)
    assert [rank for rank, _ in line.desk.sent(Fence)] == [3]


def test_an_executor_that_starts_is_not_started_anew_by_the_next_coordinator():
    """Importing torch takes longer than a supervisor may be silent, and says nothing meanwhile."""
    line = Line(restarts=3)
    lose(line.desk, 3)
    start(line.desk, 3)
    desk = line.hand_over()
    for _ in range(3):
        run_steps(desk, 1)
        desk.say(3, BEAT)
        desk.wait(desk.timing.silent_s, beats=BEAT)
    assert not desk.sent(Respawn)
    desk.say(3, ready())
    assert desk.coordinator.returned == {3}


def test_what_a_rank_proved_and_how_often_it_relapsed_outlives_the_coordinator():
    """The second time it must be good twice as long, whoever counts; a takeover is no relapse."""
    line = Line(restarts=3)
    for relapse in range(2):
        run_steps(line.desk, 1)
        lose(line.desk, 3)
        start(line.desk, 3)
        line.desk.say(3, ready())
        must_be_good = GOOD << relapse
        for _ in range(must_be_good - 1):
            desk = line.hand_over()
            run_steps(desk, 1)
            desk.say(3, ready())  # later than the step, as it may come
            assert not desk.sent(Request)
        desk = line.hand_over()
        desk.say(3, ready())
        run_steps(desk, 1)
        assert [request.what for _, request in desk.sent(Request)] == ["yield"]
        grow(desk)
        assert desk.alive == [0, 1, 2, 3]


def test_a_version_that_was_refused_is_not_gone_back_to_by_another_coordinator():
    """Its marker is there still."""
    job = msgspec.structs.replace(job_of(), checkpoint=CheckpointConfig(dir="d", every=2))
    position = Position(dataset="d", seed=0, tokens=64, num_microbatches=4)
    versions = tuple(SavedVersion(step, f"v{step}", step, position, 0) for step in (4, 2))
    first = Desk(job, place=SavePlace("/d", "run", versions, ())).run()
    first.say(1, VersionRefused(generation=9, name="v4", why="its bytes are damaged"))
    desk = Desk(job, place=SavePlace("/d", "run", versions, ()))
    desk.coordinator.remember(memory_of(rows_of(first), 0))
    desk.do(desk.coordinator.stop("stopped", 143, 0.0))
    assert desk.end is not None
    assert "newest saved: v2 (step 2)" in desk.end.reason


@pytest.mark.parametrize("late", [0, 1])
def test_layers_that_wait_for_the_end_of_an_iteration_move_under_the_next_coordinator(late: int):
    """The journal says that they wait; it asks for the boundary after the first step it sees, also
    where that is a later one."""
    line = Line(restarts=0)
    run_steps(line.desk, 2)
    lose(line.desk, 3)
    run_steps(line.desk, late)
    desk = line.hand_over(waits_for_boundary=True)
    assert not desk.sent(Request)
    run_steps(desk, 2)
    assert [request.what for _, request in desk.sent(Request)] == ["yield"]


# --- events


def test_an_order_to_start_counts_once_something_started():
    """Else it would be counted again where that is told to the next coordinator."""
    lost = "rank_lost", {"rank": 3, "evidence": "gone"}
    order = "respawn", {"rank": 3, "start": 2}
    begun = "executor_started", {"rank": 3, "pid": 7}
    assert events(lost, order).starts == {}
    memory = events(lost, order, begun)
    assert (memory.starts, memory.starting) == ({3: 2}, {3})
    assert events(lost, order, begun, ("took_part", {"ranks": [3], "step": 5})).starts == {}


def test_of_trust_the_newest_counts():
    """Until a rank is forgiven."""
    first = "trust", {"rank": 2, "relapses": 0, "good_since": None}
    second = "trust", {"rank": 2, "relapses": 1, "good_since": 8}
    assert events(first, second).trust == {2: Record(1, 8)}
    assert events(first, second, ("forgiven", {"rank": 2})).trust == {}


def test_who_starts_or_is_back_is_so_until_it_dies_again():
    begun = "executor_started", {"rank": 3, "pid": 7}
    back = "rank_returned", {"rank": 3, "step": 5}
    died = "died_again", {"rank": 3, "how": "signal 9"}
    assert (events(begun).starting, events(begun).returned) == ({3}, set())
    assert (events(begun, back).starting, events(begun, back).returned) == (set(), {3})
    for memory in (events(begun, died), events(begun, back, died)):
        assert (memory.starting, memory.returned, memory.told_lost) == (set(), set(), {3})


def test_rows_that_say_something_else_or_nothing_are_passed_over():
    rows = [b"", b"{}", b'{"event":"trust","at_s":1,"rank":"x"}', b'{"event":"running","at_s":1}']
    assert memory_of(rows, 0) == Memory(num_plans=1)
