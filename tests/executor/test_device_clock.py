"""Device clocks: alarms, and streams whose chunks follow each other without a gap."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import TypeVar

import pytest
import uvloop

from resihp.errors import GenerationClosed
from resihp.executor.emulation.alarm import LoopAlarm, TimerfdAlarm
from resihp.executor.emulation.clock import FORGIVEN_NS, Clock
from resihp.executor.emulation.stream import EmulatedStream, LocalMeeting
from resihp.executor.emulation.virtual import run_virtually
from resihp.executor.interpreter.observe import Observation
from resihp.executor.stream import Event

_MS = 1_000_000
_T = TypeVar("_T")


def in_real_time(main: Callable[[], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        return await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


@pytest.mark.parametrize("kind", [TimerfdAlarm, LoopAlarm])
def test_an_alarm_rings_once_and_never_early(kind: type[TimerfdAlarm] | type[LoopAlarm]):
    """An earlier time replaces a later one, and the callback gets the time that was set."""

    async def main() -> list[tuple[int, int]]:
        rung: list[tuple[int, int]] = []
        happened = asyncio.Event()

        def ring(at_ns: int) -> None:
            rung.append((at_ns, time.monotonic_ns()))
            happened.set()

        alarm = kind(ring)
        now = time.monotonic_ns()
        alarm.set(now + 3600_000 * _MS)
        alarm.set(now + 3 * _MS)
        await happened.wait()
        happened.clear()
        alarm.set(now)  # over already: rings at once
        await happened.wait()
        alarm.close()
        assert [at for at, _ in rung] == [now + 3 * _MS, now]
        return rung

    rung = in_real_time(main)
    assert all(seen >= at - 2 * _MS for at, seen in rung)  # the loop's timers round to 1 ms


async def _chain(clock: Clock, num: int, lasts_ns: int) -> tuple[int, int]:
    """Begin and end of `num` chunks on one stream, queued ahead."""
    stream = EmulatedStream(clock)
    stream.hold()
    events = [stream.submit(lambda: stream.take(lasts_ns)) for _ in range(num)]
    begin_ns = clock.host_ns()
    stream.release(begin_ns)
    await events[-1].wait_async()
    for before, after in pairwise(events):
        assert after.at_ns - before.at_ns >= lasts_ns
    return begin_ns, events[-1].at_ns


def test_wake_ups_that_are_late_do_not_add_up():
    """Forty chunks that are queued ahead end when forty chunks have passed, to the nanosecond."""

    async def main() -> None:
        clock = Clock()
        begin_ns, end_ns = await _chain(clock, 40, 2 * _MS)
        assert end_ns - begin_ns == 80 * _MS
        assert clock.handled_ns >= end_ns, "nobody is told before the time has come"
        clock.close()

    in_real_time(main)


def test_a_device_waits_for_a_host_that_is_later_than_what_is_forgiven():
    async def main() -> None:
        clock = Clock()
        stream = EmulatedStream(clock)
        first = stream.submit(lambda: stream.take(_MS))
        await first.wait_async()
        time.sleep((FORGIVEN_NS + 4 * _MS) * 1e-9)  # the host does something else
        second = stream.submit(lambda: stream.take(_MS))
        await second.wait_async()
        assert second.at_ns - first.at_ns > FORGIVEN_NS + _MS
        clock.close()

    in_real_time(main)


def test_virtual_chunks_are_exact_and_never_late():
    async def main() -> None:
        clock = Clock()
        begin_ns, end_ns = await _chain(clock, 1000, 123_456_789)
        assert end_ns - begin_ns == 1000 * 123_456_789
        assert clock.num_late == 0

    run_virtually(main())


def test_an_item_starts_after_the_one_before_and_what_it_waits_for():
    """Two streams hand a result to each other; the observation has the times of the device."""

    async def main() -> None:
        clock = Clock()
        one, other = EmulatedStream(clock), EmulatedStream(clock)
        seen = Observation(3)
        seen.clear(0)
        other.observation = seen
        begin = clock.host_ns()
        made = one.submit(lambda: one.take(5) or "made")
        before = other.submit(lambda: other.take(2), label=0)
        used = other.submit(lambda: other.take(7) or made.wait(), waits=[made], label=1)
        other.submit(lambda: other.take(1), label=2)
        assert await used.wait_async() == "made"
        await other.when_idle().wait_async()
        assert (made.at_ns, before.at_ns, used.at_ns) == (begin + 5, begin + 2, begin + 12)
        assert [at - begin for at in seen.starts_ns] == [0, 5, 12]
        assert [at - begin for at in seen.ends_ns] == [2, 12, 13]

    run_virtually(main())


def test_a_meeting_begins_with_its_last_member_and_ends_for_all_at_once():
    async def main() -> None:
        clock = Clock()
        streams = [EmulatedStream(clock, rank) for rank in range(3)]
        meeting = LocalMeeting(clock, range(3))
        begin, events = clock.host_ns(), list[Event]()
        for number, stream in enumerate(streams):
            stream.submit(lambda stream=stream, number=number: stream.take(10 * number))
            events.append(stream.submit(lambda stream=stream: stream.meet(meeting, 5)))
        for event in events:
            await event.wait_async()
        assert [event.at_ns - begin for event in events] == [25] * 3

    run_virtually(main())


def test_an_error_drops_what_is_queued_behind_it_and_is_told_once():
    async def main() -> None:
        stream = EmulatedStream(Clock())
        told: list[BaseException] = []
        stream.on_error = told.append
        first = stream.submit(lambda: stream.take(5))
        bad = stream.submit(lambda: {}["missing"])
        behind = stream.submit(lambda: stream.take(5))
        await stream.when_idle().wait_async()
        assert first.error is None
        assert isinstance(bad.error, KeyError)
        assert behind.error is bad.error
        assert told == [bad.error]
        assert stream.submit(lambda: None).error is bad.error
        stream.reset()
        assert await stream.submit(lambda: 3).wait_async() == 3

    run_virtually(main())


def test_cancel_ends_what_waits_and_what_others_are_missing_for():
    """A chunk that runs goes on to its end; a rendezvous that is not complete does not."""

    async def main() -> None:
        clock = Clock()
        waiting, alone, running = (EmulatedStream(clock) for _ in range(3))
        never = waiting.submit(lambda: None, waits=[Event()])
        meeting = alone.submit(lambda: alone.meet(LocalMeeting(clock, (0, 1)), 5))
        chunk = running.submit(lambda: running.take(5) or "done")
        for stream in (waiting, alone, running):
            stream.cancel()
            await stream.when_idle().wait_async()
        assert isinstance(never.error, GenerationClosed)
        assert isinstance(meeting.error, GenerationClosed)
        assert chunk.wait() == "done"
        for stream in (waiting, alone, running):
            stream.reset()
            assert await stream.submit(lambda: 1).wait_async() == 1

    run_virtually(main())


def test_what_waits_for_a_failed_event_fails_with_its_error():
    async def main() -> None:
        stream, source = EmulatedStream(Clock()), Event()
        item = stream.submit(lambda: 1, waits=[source])
        assert stream.is_waiting
        source.fail(GenerationClosed("over"))
        await stream.when_idle().wait_async()
        assert item.error is source.error

    run_virtually(main())
