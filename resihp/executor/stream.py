"""Streams and events: work is queued ahead of time and runs in order, as on a GPU queue.

`submit` returns at once with an `Event`; the work runs after the events that it waits for. A
stream whose work fails drops everything queued behind it, so one error ends the whole iteration.
`cancel` makes every queued item and every waiter end with `GenerationClosed`.

`ThreadStream` is the CPU backend: one thread and one FIFO.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from resihp.errors import GenerationClosed

__all__ = ["Event", "ThreadStream"]


class Event:
    """Something that happens once, with a result or an error; set from any thread."""

    __slots__ = ("_callbacks", "_condition", "_done", "_error", "_result")

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Event], None]] = []

    def set(self, result: Any = None) -> None:
        """Happen. The first of `set` and `fail` wins; later ones are ignored."""
        self._finish(result, None)

    def fail(self, error: BaseException) -> None:
        """Happen with an error, which every waiter raises."""
        self._finish(None, error)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        with self._condition:
            if self._done:
                return
            self._done, self._result, self._error = True, result, error
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for callback in callbacks:
            callback(self)

    @property
    def done(self) -> bool:
        """Whether it happened."""
        return self._done

    @property
    def error(self) -> BaseException | None:
        """The error it happened with, None where it did not happen or went well."""
        return self._error

    def wait(self) -> Any:
        """Block this thread until the event; its result. Raises the error of `fail`.

        There is no timeout here: whoever owns the event ends it (a stream or a transport fails
        all of its events when it is cancelled or closed).
        """
        with self._condition:
            while not self._done:
                self._condition.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def when_done(self, callback: Callable[[Event], None]) -> None:
        """Call `callback(self)` once, from the thread that sets the event (or now)."""
        with self._condition:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    async def wait_async(self) -> Any:
        """The asyncio side of `wait`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def happened(_: Event) -> None:
            loop.call_soon_threadsafe(wake)

        self.when_done(happened)
        await future
        return self.wait()


class _Item(NamedTuple):
    work: Callable[[], Any]
    waits: Sequence[Event]
    event: Event
    label: int


class ThreadStream:
    """A FIFO of work on a thread of its own.

    `position` is the label of the item that runs now (-1: idle), for progress reports.
    """

    def __init__(self, name: str) -> None:
        self.position = -1
        self._queue: deque[_Item] = deque()
        self._condition = threading.Condition()
        self._broken: BaseException | None = None
        self._busy = False
        self._idle_events: list[Event] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], Any], *, waits: Sequence[Event] = (), label: int = -1
    ) -> Event:
        """Queue `work` to run after all earlier items and after `waits`; never blocks."""
        item = _Item(work, waits, Event(), label)
        with self._condition:
            broken = self._broken
            if broken is None:
                self._queue.append(item)
                self._condition.notify_all()
        if broken is not None:
            item.event.fail(broken)
        return item.event

    def cancel(self, error: BaseException | None = None) -> None:
        """Drop everything queued and refuse more until `reset`. The running item runs on.

        An item that waits for an event is woken by whoever fails that event.
        """
        with self._condition:
            if self._broken is None:
                self._broken = error or GenerationClosed("the generation is over")
            dropped, self._queue = self._queue, deque()
            idle = self._take_idle_events() if not self._busy else []
        for item in dropped:
            item.event.fail(self._broken)
        for event in idle:
            event.set()

    def reset(self) -> None:
        """Accept work again after `cancel` or an error; the stream must be idle."""
        with self._condition:
            assert not self._busy, "reset of a busy stream"
            assert not self._queue, "reset of a stream with work"
            self._broken = None

    def when_idle(self) -> Event:
        """An event for the moment when nothing runs and nothing is queued."""
        event = Event()
        with self._condition:
            if self._busy or self._queue:
                self._idle_events.append(event)
                return event
        event.set()
        return event

    def _take_idle_events(self) -> list[Event]:
        events, self._idle_events = self._idle_events, []
        return events

    def _next(self) -> _Item:
        with self._condition:
            self._busy = False
            idle = self._take_idle_events() if not self._queue else []
        for event in idle:
            event.set()
        with self._condition:
            while not self._queue:
                self._condition.wait()
            self._busy = True
            return self._queue.popleft()

    def _run(self) -> None:
        while True:
            item = self._next()
            self.position = item.label
            try:
                for event in item.waits:
                    event.wait()
                if self._broken is not None:
                    raise self._broken
                result = item.work()
            except BaseException as error:  # the event carries it to whoever waits
                item.event.fail(error)
                self.cancel(error)
            else:
                item.event.set(result)
            self.position = -1
            del item
