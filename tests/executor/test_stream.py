"""Streams: queued work runs in order, errors end everything behind them, nothing waits forever."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable

import pytest

from resihp.errors import CommError, GenerationClosed
from resihp.executor.stream import Event, ThreadStream

FAR_S = 20.0


def finished(event: Event) -> bool:
    """Wait for an event, whatever it brings; False where it does not happen."""
    happened = threading.Event()
    event.when_done(lambda _: happened.set())
    return happened.wait(FAR_S)


@pytest.fixture
def stream() -> ThreadStream:
    return ThreadStream("test")


@pytest.fixture
def gate() -> threading.Event:
    """What `hold` waits for; open at the end, so that no thread is left behind."""
    return threading.Event()


@pytest.fixture
def hold(gate: threading.Event):
    def wait() -> None:
        assert gate.wait(FAR_S)

    yield wait
    gate.set()


# --- events


def test_an_event_happens_once():
    """The first of set and fail wins."""
    event = Event()
    event.set(1)
    event.set(2)
    event.fail(CommError("late"))
    assert event.done
    assert event.error is None
    assert event.wait() == 1


def test_every_waiter_of_a_failed_event_raises_its_error():
    """The same object, so that its cause is known."""
    event, error = Event(), CommError("gone")
    event.fail(error)
    for _ in range(2):
        with pytest.raises(CommError) as caught:
            event.wait()
        assert caught.value is error
    assert event.error is error


def test_callbacks_are_called_once_before_or_after():
    """At once where the event has happened."""
    event, calls = Event(), []
    event.when_done(lambda e: calls.append(("before", e.wait())))
    event.set(5)
    event.when_done(lambda e: calls.append(("after", e.wait())))
    event.set(6)
    assert calls == [("before", 5), ("after", 5)]


@pytest.mark.asyncio
async def test_a_coroutine_can_wait_for_another_thread():
    """For results and for errors."""
    good, bad = Event(), Event()
    threading.Timer(0.0, good.set, ["x"]).start()
    threading.Timer(0.0, bad.fail, [CommError("gone")]).start()
    assert await good.wait_async() == "x"
    with pytest.raises(CommError):
        await bad.wait_async()


@pytest.mark.asyncio
async def test_a_cancelled_wait_leaves_the_event_alone():
    """It may happen later, and others may still wait."""
    event = Event()
    task = asyncio.create_task(event.wait_async())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    event.set(3)
    assert await event.wait_async() == 3


def test_many_threads_may_wait_for_one_event():
    """All are woken."""
    event, results = Event(), []
    threads = [threading.Thread(target=lambda: results.append(event.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    event.set("x")
    for thread in threads:
        thread.join(FAR_S)
    assert results == ["x"] * 8


# --- streams


def test_work_runs_in_the_order_of_its_submission(stream: ThreadStream):
    """On one thread that is not ours."""
    seen: list[tuple[int, int]] = []
    events = [
        stream.submit(lambda n=n: seen.append((n, threading.get_ident()))) for n in range(100)
    ]
    assert finished(events[-1])
    assert [n for n, _ in seen] == list(range(100))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_submitting_runs_ahead_of_the_work(
    stream: ThreadStream, hold: Callable[[], None], gate: threading.Event
):
    """A whole iteration is queued while its first item still runs."""
    events = [stream.submit(hold)] + [stream.submit(lambda: None) for _ in range(1000)]
    assert not any(event.done for event in events)
    gate.set()
    assert all(map(finished, events))


def test_an_event_carries_the_result_of_its_work(stream: ThreadStream):
    """Later work may use it."""
    first = stream.submit(lambda: 20)
    assert stream.submit(lambda: first.wait() + 1, waits=[first]).wait() == 21


def test_work_waits_for_events_of_elsewhere(stream: ThreadStream):
    """And holds back everything behind it, since a stream is a FIFO."""
    other, seen = Event(), []
    stream.submit(lambda: seen.append("first"), waits=[other])
    last = stream.submit(lambda: seen.append("second"))
    assert not last.done
    other.set()
    assert finished(last)
    assert seen == ["first", "second"]


def test_an_error_ends_everything_behind_it(
    stream: ThreadStream, hold: Callable[[], None], gate: threading.Event
):
    """One broken item ends the whole iteration, with its own error everywhere."""
    seen: list[str] = []
    error = CommError("peer gone")

    def broken() -> None:
        hold()
        raise error

    events = [stream.submit(broken), stream.submit(lambda: seen.append("behind"))]
    gate.set()
    assert all(map(finished, events))
    events.append(stream.submit(lambda: seen.append("later")))
    assert [event.error for event in events] == [error] * 3
    assert not seen


def test_a_failed_event_ends_whoever_waits_for_it(stream: ThreadStream):
    """The work itself does not run."""
    other, seen = Event(), []
    event = stream.submit(lambda: seen.append("ran"), waits=[other])
    other.fail(GenerationClosed("over"))
    assert finished(event)
    assert isinstance(event.error, GenerationClosed)
    assert not seen


def test_cancel_drops_what_is_queued_and_lets_the_running_item_end(
    stream: ThreadStream, hold: Callable[[], None], gate: threading.Event
):
    """Whoever waits for the dropped work is woken at once."""
    running = threading.Event()

    def work() -> str:
        running.set()
        hold()
        return "done"

    seen: list[str] = []
    first = stream.submit(work)
    assert running.wait(FAR_S)
    behind = [stream.submit(lambda: seen.append("ran")) for _ in range(3)]
    stream.cancel()
    assert all(event.done for event in behind)
    behind.append(stream.submit(lambda: seen.append("ran")))
    assert all(isinstance(event.error, GenerationClosed) for event in behind)
    assert not first.done
    gate.set()
    assert finished(first)
    assert first.wait() == "done"
    assert not seen


def test_work_that_waits_does_not_run_after_a_cancel(stream: ThreadStream):
    """Its event may still come, but its generation is over."""
    other, seen = Event(), []
    waiting = stream.submit(lambda: seen.append("ran"), waits=[other])
    idle = stream.when_idle()
    stream.cancel()  # the item is queued still, or waits already: both must end well
    other.set()
    assert finished(waiting)
    assert finished(idle)
    assert isinstance(waiting.error, GenerationClosed)
    assert not seen


def test_the_first_error_is_the_one_that_is_told(stream: ThreadStream):
    """A cancel after the failure does not hide what happened."""
    error = CommError("first")

    def broken() -> None:
        raise error

    assert finished(stream.submit(broken))
    assert finished(stream.when_idle())
    stream.cancel()
    assert stream.submit(lambda: None).error is error


def test_reset_makes_a_stream_usable_again(stream: ThreadStream):
    """After a cancel and after an error, any number of times."""

    def broken() -> None:
        raise CommError("again")

    for _ in range(3):
        assert finished(stream.submit(broken))
        assert finished(stream.when_idle())
        stream.reset()
        assert stream.submit(lambda: 1).wait() == 1
        stream.cancel()
        assert finished(stream.when_idle())
        stream.reset()


def test_reset_of_a_busy_stream_is_a_bug(
    stream: ThreadStream, hold: Callable[[], None], gate: threading.Event
):
    """Work of the old generation could run into the new one."""
    running = threading.Event()

    def work() -> None:
        running.set()
        hold()

    stream.submit(work)
    assert running.wait(FAR_S)
    stream.cancel()
    with pytest.raises(AssertionError, match="busy"):
        stream.reset()
    gate.set()
    assert finished(stream.when_idle())
    stream.reset()


def test_idle_means_that_nothing_runs_and_nothing_is_queued(
    stream: ThreadStream, hold: Callable[[], None], gate: threading.Event
):
    """At once on a fresh stream; otherwise after the last item, cancelled or not."""
    assert finished(stream.when_idle())
    seen: list[int] = []
    stream.submit(hold)
    for n in range(50):
        stream.submit(lambda n=n: seen.append(n))
    idle = [stream.when_idle(), stream.when_idle()]
    assert not any(event.done for event in idle)
    gate.set()
    assert all(map(finished, idle))
    assert len(seen) == 50


def test_the_position_is_the_label_of_what_runs_or_waits(
    stream: ThreadStream, hold: Callable[[], None], gate: threading.Event
):
    """For the beat: which instruction this rank stands at."""
    waited = threading.Event()

    class Watched(Event):
        def wait(self) -> object:
            waited.set()
            return super().wait()

    seen: list[int] = []
    for label in (4, 9):
        stream.submit(lambda: seen.append(stream.position), label=label)
    other = Watched()
    stream.submit(lambda: None, waits=[other], label=11)
    assert waited.wait(FAR_S)
    assert seen == [4, 9]
    assert stream.position == 11
    other.set()
    assert finished(stream.when_idle())
    assert stream.position == -1


def test_a_callback_that_raises_breaks_the_stream(
    stream: ThreadStream, hold: Callable[[], None], gate: threading.Event
):
    """It is a bug: it is told, what is queued ends with it, and nobody waits forever."""
    told: list[BaseException] = []
    stream.on_error = told.append
    bug = ValueError("in a callback")

    def wrong(_: Event) -> None:
        raise bug

    stream.submit(hold)
    done = stream.submit(lambda: 1)
    behind = stream.submit(lambda: 2)
    done.when_done(wrong)
    behind.when_done(wrong)
    last = stream.submit(lambda: 3)
    gate.set()
    assert finished(done)
    assert finished(last)
    assert finished(stream.when_idle())
    assert told == [bug]
    assert done.wait() == 1
    assert last.error is bug
    stream.reset()
    assert stream.submit(lambda: 4).wait() == 4


def random_graph(seed: int, count: int) -> list[tuple[int, list[int]]]:
    """Per item its stream and the earlier items that it waits for, mostly of the other one."""
    chosen = random.Random(seed)
    return [
        (
            chosen.randrange(2),
            sorted({chosen.randrange(n) for _ in range(chosen.randrange(3)) if n}),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_two_streams_that_wait_for_each_other_finish(seed: int):
    """Waits go to earlier submissions only, so there is always something that can run."""
    streams = [ThreadStream("a"), ThreadStream("b")]
    order: list[int] = []
    events: list[Event] = []
    graph = random_graph(seed, 400)
    for n, (where, waits) in enumerate(graph):
        events.append(
            streams[where].submit(lambda n=n: order.append(n), waits=[events[i] for i in waits])
        )
    assert all(map(finished, events))
    place = {n: at for at, n in enumerate(order)}
    assert len(place) == len(graph)
    for n, (_, waits) in enumerate(graph):
        assert all(place[i] < place[n] for i in waits)


@pytest.mark.parametrize("seed", range(8))
def test_a_cancel_at_any_moment_leaves_nothing_waiting(seed: int):
    """Every event happens, both streams become idle, and a new generation runs clean."""
    streams = [ThreadStream("a"), ThreadStream("b")]
    chosen = random.Random(seed)
    for _ in range(10):
        started, events = threading.Event(), list[Event]()
        mark = chosen.randrange(200)
        for n, (where, waits) in enumerate(random_graph(chosen.randrange(1 << 30), 200)):
            work = started.set if n == mark else (lambda: None)
            events.append(streams[where].submit(work, waits=[events[i] for i in waits]))
        assert started.wait(FAR_S)
        for stream in streams:
            stream.cancel()
        assert all(map(finished, events))
        for stream in streams:
            assert finished(stream.when_idle())
            stream.reset()
    assert streams[0].submit(lambda: "clean").wait() == "clean"
