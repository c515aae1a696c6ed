"""Ranks that are lost before the first plan: nothing is to recover, they are started again."""

from __future__ import annotations

import msgspec
from coordinator_cases import Desk, exited, job_of, ready

from resihp.config import RejoinConfig
from resihp.monitor.actions import Log
from resihp.monitor.coordinator import Phase
from resihp.wire.messages import ExecutorExited, ExecutorStarted, Hello, Resend, Respawn

RESTARTS = 2


def desk_of(restarts: int = RESTARTS) -> Desk:
    """All ranks but 1 are ready."""
    rejoin = RejoinConfig(restarts=restarts)
    desk = Desk(msgspec.structs.replace(job_of(), rejoin=rejoin))
    for rank in desk.world:
        desk.say(rank, ExecutorStarted(pid=100 + rank))
        if rank != 1:
            desk.say(rank, ready())
    return desk


def killed(rank: int, pid: int | None = None) -> ExecutorExited:
    return msgspec.structs.replace(exited(-9), pid=100 + rank if pid is None else pid)


def respawned(desk: Desk) -> list[tuple[int, int]]:
    return [(rank, order.after) for rank, order in desk.sent(Respawn)]


def test_an_executor_that_is_killed_is_started_again_and_the_others_wait():
    """Also one that was ready before."""
    desk = desk_of()
    desk.say(2, killed(2))
    assert respawned(desk) == [(2, 102)]
    desk.say(1, ready())
    assert desk.phase is Phase.STARTING
    desk.say(2, ExecutorStarted(pid=7))
    desk.say(2, ready())
    assert (desk.phase, desk.end) == (Phase.OPENING, None)
    assert not desk.coordinator.incidents


def test_it_has_as_long_as_the_others_had():
    """From the moment it is started again."""
    desk = desk_of()
    desk.wait(desk.timing.start_s - 1)
    desk.say(1, killed(1))
    desk.wait(desk.timing.start_s - 1)
    assert desk.end is None


def test_an_end_that_is_said_again_counts_once():
    """A second order would find the executor that follows, and end it."""
    desk = desk_of()
    for _ in range(3):
        desk.say(1, killed(1))
    assert respawned(desk) == [(1, 101)]
    desk.say(1, ExecutorStarted(pid=7))
    desk.say(1, killed(1))
    desk.wait(2 * desk.timing.silent_s)
    assert respawned(desk) == [(1, 101)]


def test_who_dies_again_and_again_ends_the_job():
    """Within the budget of restarts."""
    desk = desk_of()
    pid = 101
    for number in range(RESTARTS + 1):
        desk.say(1, killed(1, pid))
        desk.wait(2 * desk.timing.silent_s)
        pid = 7 + number
        desk.say(1, ExecutorStarted(pid=pid))
    assert desk.end is not None
    assert desk.end.exit_code == 1
    assert desk.end.reason.startswith("rank 1 ended before the start (signal 9)")
    assert len(respawned(desk)) == RESTARTS


def test_the_first_step_gives_the_budget_back():
    """It is the one that counts later, also under another coordinator."""
    desk = desk_of()
    desk.say(1, killed(1))
    desk.say(1, ExecutorStarted(pid=7))
    desk.say(1, ready())
    desk.join()
    desk.step(0)
    proved = [log.fields["ranks"] for log in desk.all_of(Log) if log.kind == "took_part"]
    assert proved == [[1]]


def test_what_was_to_hit_an_executor_before_the_start_is_forgotten():
    """A later loss of the rank was not seen that late."""
    desk = desk_of()
    desk.coordinator.hit(2, 0.0)
    desk.say(2, killed(2))
    desk.say(2, ExecutorStarted(pid=7))
    desk.say(1, ready())
    desk.say(2, ready())
    desk.join()
    desk.gone(2)
    (incident,) = desk.coordinator.incidents
    assert incident.hit_s is None


def test_without_restarts_the_first_loss_ends_the_job():
    """Nobody starts it again, so nobody waits."""
    for lose in (lambda desk: desk.say(1, killed(1)), lambda desk: desk.gone(1)):
        desk = desk_of(restarts=0)
        lose(desk)
        assert desk.end is not None
        assert "before the start" in desk.end.reason


def test_a_supervisor_that_is_started_again_is_told_to_begin():
    """It has no executor until then."""
    desk = desk_of()
    desk.gone(2)
    desk.wait(desk.timing.silent_s / 2)
    for _ in range(2):  # once by itself, once as the answer to `Resend`
        desk.say(2, Hello(pid=5, has_executor=False))
    assert set(respawned(desk)) == {(2, 102)}
    desk.wait(desk.timing.silent_s)
    assert desk.end is None


def test_a_supervisor_that_does_not_come_back_ends_the_job():
    """Under torchrun nobody but torchrun starts it again, and that with all others."""
    desk = desk_of()
    desk.gone(2)
    desk.wait(desk.timing.silent_s + 0.1)
    assert desk.end is not None
    assert desk.end.reason.startswith("rank 2 was gone before the start")


def test_a_connection_that_breaks_costs_no_executor():
    """The supervisor comes back with the executor that it has, and says again how far that is."""
    desk = desk_of()
    desk.gone(2)
    desk.say(2, Hello(pid=5, has_executor=True))
    assert 2 in dict(desk.sent(Resend))
    desk.say(1, ready())
    assert desk.phase is Phase.STARTING
    desk.say(2, ready())
    desk.wait(2 * desk.timing.silent_s)
    assert desk.end is None
    assert not desk.sent(Respawn)


def test_an_order_to_start_that_may_not_have_arrived_is_repeated():
    """Where its monitor is new, and nothing has come of it."""
    desk = desk_of()
    desk.say(1, killed(1))
    desk.say(1, Hello(pid=5, has_executor=True))
    assert respawned(desk) == [(1, 101)] * 2
