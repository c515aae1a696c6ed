"""Emulated ranks whose messages and meetings go over real sockets: times are those of one clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from resihp.errors import GenerationClosed, PeerLost
from resihp.executor.device.interface import Tag
from resihp.executor.emulation.clock import Clock
from resihp.executor.emulation.remote import RemoteMeeting, RemoteWire
from resihp.executor.emulation.state import EmulatedState
from resihp.executor.emulation.stream import EmulatedStream
from resihp.executor.emulation.work import EmulatedTensor
from resihp.executor.stream import Event
from resihp.executor.transport import Transport
from resihp.ir.model import Op
from resihp.wire.messages import Commit, StepRecord

_MS = 1_000_000
TAG = Tag(int(Op.SEND_ACT), 3, 1, 0, 2, 0)


def with_ranks(main: Callable[[Clock, list[Transport]], Awaitable[None]], num_ranks: int) -> None:
    """Run `main` with connected transports of one generation."""

    async def run() -> None:
        transports = [Transport("job", rank, timeout_s=10.0) for rank in range(num_ranks)]
        addresses = {rank: await each.open() for rank, each in enumerate(transports)}
        for each in transports:
            each.begin(1, b"k" * 32, addresses)
        for rank, each in enumerate(transports):
            await each.connect(set(addresses) - {rank})
        clock = Clock()
        try:
            await main(clock, transports)
        finally:
            clock.close()
            for each in transports:
                await each.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_a_message_is_there_when_it_is_due_and_says_what_it_is():
    """It leaves when its source ends and takes the sender's time, whatever the socket takes."""

    async def main(clock: Clock, transports: list[Transport]) -> None:
        ends = [RemoteWire(clock, each, lambda _: 30 * _MS) for each in transports]
        stream = EmulatedStream(clock)
        made = stream.submit(lambda: stream.take(2 * _MS) or EmulatedTensor(False, 1, (0, 2)))
        ends[0].send(1, TAG, made, lambda tensor: tensor._replace(num_chunks=2, chunk=1))
        arrived = ends[1].receive(0, TAG, 0)
        assert await arrived.wait_async() == EmulatedTensor(False, 1, (0, 2), 1, 2)
        assert arrived.at_ns - made.at_ns >= 30 * _MS
        assert clock.host_ns() >= arrived.at_ns

    with_ranks(main, 2)


def test_a_meeting_ends_for_all_members_at_once():
    """After the last has come, and the longest need of all, on the one clock of the machine."""

    async def main(clock: Clock, transports: list[Transport]) -> None:
        streams = [EmulatedStream(clock, rank) for rank in range(3)]
        events, befores = list[Event](), list[Event]()
        for rank, (stream, transport) in enumerate(zip(streams, transports, strict=True)):
            meeting = RemoteMeeting(clock, transport, TAG, (0, 1, 2))
            befores.append(stream.submit(lambda s=stream, r=rank: s.take(5 * r * _MS)))
            events.append(stream.submit(lambda s=stream, m=meeting: s.meet(m, 40 * _MS)))
        for event in events:
            await event.wait_async()
        assert min(event.at_ns for event in events) >= befores[-1].at_ns + 40 * _MS
        # Only a host that is badly late lets one end after the others.
        assert max(event.at_ns for event in events) <= clock.host_ns()

    with_ranks(main, 3)


def test_what_members_bring_to_a_meeting_all_of_them_have_at_its_end():
    """As in the vote of real ranks."""

    async def main(clock: Clock, transports: list[Transport]) -> None:
        meetings = [RemoteMeeting(clock, each, TAG, (0, 1, 2)) for each in transports]
        events: list[Event] = []
        for rank, meeting in enumerate(meetings):
            stream = EmulatedStream(clock, rank)
            meeting.bring((0, 4, 1)[rank])
            events.append(stream.submit(lambda s=stream, m=meeting: s.meet(m, _MS)))
        for event in events:
            await event.wait_async()
        assert [meeting.brought for meeting in meetings] == [5, 5, 5]

    with_ranks(main, 3)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_meeting_without_a_member_fails_instead_of_hanging(lost: int):
    async def main(clock: Clock, transports: list[Transport]) -> None:
        stream = EmulatedStream(clock, 1 - lost)
        told: list[BaseException] = []
        stream.on_error = told.append
        meeting = RemoteMeeting(clock, transports[1 - lost], TAG, (0, 1))
        event = stream.submit(lambda: stream.meet(meeting, _MS))
        await transports[lost].close()
        await stream.when_idle().wait_async()
        assert isinstance(event.error, PeerLost)
        assert told == [event.error]

    with_ranks(main, 2)


def test_the_end_of_a_generation_ends_every_wait():
    async def main(clock: Clock, transports: list[Transport]) -> None:
        arriving = RemoteWire(clock, transports[0], lambda _: 0).receive(1, TAG, 0)
        transports[0].end()
        assert isinstance(arriving.error, GenerationClosed)

    with_ranks(main, 2)


def record_of(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        loss=0.0,
        grad_norm=0.0,
        learning_rate=0.0,
        skipped=False,
        num_tokens=1,
        samples=(),
        duration_s=1.0,
        emulated=True,
    )


def test_a_rank_that_missed_the_vote_rolls_forward():
    """As real state does: behind by one step, or voted and not applied, or right there."""
    for voted, applied in ((False, False), (True, False), (True, True)):
        state = EmulatedState()
        state.adopt(0, Commit(version=0, updates=0, record=None))
        state.prepare(1, holds_layers=True)
        assert state.layouts == (0, 1)
        state.go()
        if voted:
            state.vote_complete(record_of(0))
        if applied:
            state.apply()
        state.adopt(1, Commit(version=1, updates=1, record=record_of(0)))
        assert (state.version, state.voted, state.updates) == (1, 1, 1)
        assert state.record == record_of(0)


def test_a_standby_rank_takes_over_the_numbers():
    state = EmulatedState()
    state.prepare(1, holds_layers=False)
    state.go()
    state.adopt(1, Commit(version=7, updates=6, record=record_of(6)))
    assert (state.version, state.updates) == (7, 6)
