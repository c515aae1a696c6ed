"""What a supervisor does of injected faults: signals, beats, its own death."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import msgspec
import pytest

from resihp.config import Injection, load
from resihp.monitor.inject import LateBeats, LostBeats, SupervisorFaults
from resihp.wire.clock import MonotonicClock
from resihp.wire.messages import Fault, Inject

JOB = load(Path(__file__).parents[2] / "examples" / "stdlib.toml")


class Recorder:
    """A `Body` that notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def signal_executor(self, number: signal.Signals) -> None:
        self.done.append(number)

    def send_up(self, fault: Fault) -> None:
        self.done.append(f"up {fault.kind}")

    def send_down(self, order: Inject) -> None:
        self.done.append(f"down {order.fault['kind']}")

    def die(self) -> None:
        self.done.append("died")


def faults_of(*injections: Injection) -> tuple[SupervisorFaults, Recorder]:
    body = Recorder()
    job = msgspec.structs.replace(JOB, inject=injections)
    return SupervisorFaults(job, body, MonotonicClock()), body


def announcement(kind: str, number: int = 0) -> Fault:
    return Fault(kind=kind, step=3, instruction=1, at_s=0.0, number=number)


@pytest.mark.parametrize(
    ("kind", "done"),
    [
        ("kill", ["up kill", signal.SIGKILL]),
        ("stop", ["up stop", signal.SIGSTOP]),
        ("slow", ["up slow", "down slow"]),
        ("full_disk", ["up full_disk", "down full_disk"]),
        ("kill_supervisor", ["up kill_supervisor", "died"]),
        ("exception", ["down exception"]),
    ],
)
@pytest.mark.asyncio
async def test_an_order_is_announced_by_whoever_carries_it_out(kind: str, done: list[object]):
    """At once by the supervisor where it can be, else by the executor at its place."""
    faults, body = faults_of()
    faults.ordered(Inject(rank=0, fault={"kind": kind}))
    assert body.done == done


@pytest.mark.asyncio
async def test_an_order_for_an_instruction_is_the_executors():
    """It knows when it is there."""
    faults, body = faults_of()
    faults.ordered(Inject(rank=0, fault={"kind": "kill", "instruction": 3}))
    assert body.done == ["down kill"]


@pytest.mark.parametrize("place", [{"instruction": 3}, {"moment": "vote"}])
@pytest.mark.asyncio
async def test_the_supervisors_part_of_an_order_waits_for_its_place(place: dict[str, str | int]):
    """The executor announces it; it is carried out once, and never for another executor."""
    faults, body = faults_of()
    faults.ordered(Inject(rank=0, fault={"kind": "kill_supervisor", **place}))
    assert body.done == ["down kill_supervisor"]
    faults.announced(announcement("kill_supervisor", number=-1))
    faults.announced(announcement("kill_supervisor", number=-1))
    assert body.done == ["down kill_supervisor", "died"]
    faults.ordered(Inject(rank=0, fault={"kind": "kill_supervisor", **place}))
    faults.started()
    faults.announced(announcement("kill_supervisor", number=-1))
    assert body.done[2:] == ["down kill_supervisor"]


@pytest.mark.asyncio
async def test_what_is_no_fault_does_nothing():
    """A malformed order comes to nobody."""
    faults, body = faults_of()
    faults.ordered(Inject(rank=0, fault={"kind": "melt"}))
    assert body.done == []


@pytest.mark.asyncio
async def test_a_stopped_executor_goes_on_after_its_time():
    """It stops itself at its place; its supervisor is who can continue it."""
    faults, body = faults_of(Injection(kind="stop", rank=0, step=3, lasts_s=0.01))
    faults.announced(announcement("stop"))
    assert body.done == []
    async with asyncio.timeout(20):
        while not body.done:
            await asyncio.sleep(0.005)
    assert body.done == [signal.SIGCONT]
    assert faults.struck == {0: 3}


@pytest.mark.asyncio
async def test_beats_are_lost_until_the_fault_is_over():
    """All of them, and none of them afterwards."""
    faults, _ = faults_of(Injection(kind="lost_beats", rank=0, step=3, lasts_s=0.05))
    sent: list[int] = []
    faults.beat(lambda: sent.append(1))
    faults.announced(announcement("lost_beats"))
    faults.beat(lambda: sent.append(2))
    await asyncio.sleep(0.06)
    faults.beat(lambda: sent.append(3))
    assert sent == [1, 3]


def test_a_share_of_beats_is_lost():
    """With the chance that was said, by its seed."""
    fault = LostBeats(0.25, 10.0, random.Random(0))
    lost = sum(fault.hold_s(5.0) is None for _ in range(4000))
    assert 800 < lost < 1200
    assert fault.hold_s(10.0) == 0.0


def test_late_beats_leave_later():
    """By the delay, until it is over."""
    fault = LateBeats(0.3, 10.0)
    assert (fault.hold_s(9.0), fault.hold_s(10.0)) == (0.3, 0.0)
