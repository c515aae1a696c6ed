"""Streams and events: work is queued ahead of time and runs in order, as on a GPU queue.

`submit` returns at once with an `Event`; the work runs after the events that it waits for. A
stream whose work fails drops everything queued behind it, so one error ends the whole iteration.
`cancel` makes every queued item and every waiter end with `GenerationClosed`.

`ThreadStream` is the CPU backend: one thread and one FIFO.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from resihp.errors import GenerationClosed

if TYPE_CHECKING:
    from resihp.executor.interpreter.observe import Observation

__all__ = ["Event", "Item", "Stream", "ThreadStream"]

_LOCK = threading.Lock()
"""Guards the moment of every event: held for well under a microsecond, so one is enough."""


class Event:
    """Something that happens once, with a result or an error; set from any thread.

    `at_ns` is when it happened, on the clock of its device (the monotonic clock on CPU). On CUDA
    an event happens when its work has been issued, and `mark` is the CUDA event that this work
    ends with: streams wait for the mark on the device, whoever reads the result on the host waits
    for the mark too. Elsewhere `mark` is None.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_result", "at_ns", "mark")

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Event], None]] | None = None
        self._done = False
        self._error: BaseException | None = None
        self._result: Any = None
        self.at_ns = 0
        self.mark: Any = None

    def set(self, result: Any = None, *, at_ns: int | None = None) -> None:
        """Happen. The first of `set` and `fail` wins; later ones are ignored."""
        self._finish(result, None, time.monotonic_ns() if at_ns is None else at_ns)

    def fail(self, error: BaseException) -> None:
        """Happen with an error, which every waiter raises."""
        self._finish(None, error, time.monotonic_ns())

    def _finish(self, result: Any, error: BaseException | None, at_ns: int) -> None:
        with _LOCK:
            if self._done:
                return
            self._result, self._error, self.at_ns = result, error, at_ns
            self._done = True
            callbacks, self._callbacks = self._callbacks, None
        if callbacks is not None:
            self._tell(callbacks)

    def _tell(self, callbacks: Sequence[Callable[[Event], None]]) -> None:
        """Call all, for each may be somebody who waits; then raise what the first to fail raised.

        One that raises is a bug, and it must not look like a hang.
        """
        errors: list[BaseException] = []
        for callback in callbacks:
            try:
                callback(self)
            except BaseException as error:  # raised below
                errors.append(error)
        if errors:
            raise errors[0]

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

        There is no timeout here: whoever owns the event ends it (a stream or a wire fails all of
        its events when it is cancelled or ended).
        """
        if not self._done:
            gate = threading.Lock()
            gate.acquire()
            self.when_done(lambda _: gate.release())
            gate.acquire()
        if self._error is not None:
            raise self._error
        return self._result

    def when_done(self, callback: Callable[[Event], None]) -> None:
        """Call `callback(self)` once, from the thread that sets the event (or now)."""
        if not self._done:
            with _LOCK:
                if not self._done:
                    if self._callbacks is None:
                        self._callbacks = [callback]
                    else:
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


class Stream(Protocol):
    """An ordered queue of work; the backends are a thread, a CUDA stream and a device clock.

    The stream is at the item that runs now or waits for its events. `observation` (None: nobody
    looks) gets start and end of every item with a label; it changes between iterations, when
    nothing is queued. `on_error` is called once, from any thread, with the error that broke the
    stream, but not for a `cancel`.
    """

    observation: Observation | None
    on_error: Callable[[BaseException], None] | None

    @property
    def position(self) -> int:
        """Label of the item that the stream is at; -1: of none."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Whether that item's events have not all happened, on the device too."""
        ...

    def submit(
        self, work: Callable[[], Any], *, waits: Sequence[Event] = (), label: int = -1
    ) -> Event:
        """Queue `work` to run after all earlier items and after `waits`; never blocks.

        The event happens with the result of `work`, or fails with its error, that of a wait, or
        that which broke the stream earlier.
        """
        ...

    def cancel(self, error: BaseException | None = None) -> None:
        """Drop everything queued and refuse more until `reset`. The running item runs on.

        What is dropped fails with `error` (None: `GenerationClosed`), or with an earlier one that
        broke the stream. An item that waits for an event is woken by whoever fails that event.
        """
        ...

    def reset(self) -> None:
        """Accept work again after `cancel` or an error; the stream must be idle."""
        ...

    def when_idle(self) -> Event:
        """An event for the moment when nothing runs and nothing is queued."""
        ...


class Item(NamedTuple):
    """Queued work."""

    work: Callable[[], Any]
    waits: Sequence[Event]
    event: Event
    label: int


class ThreadStream:
    """A FIFO of work on a thread of its own (see `Stream`)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._position = -1
        self._is_waiting = False
        self.observation: Observation | None = None
        self.on_error: Callable[[BaseException], None] | None = None
        self._queue: deque[Item] = deque()
        self._lock = threading.Lock()
        self._work_is_here = threading.Lock()
        """Held, but for the moment when work comes to a sleeping thread."""
        self._work_is_here.acquire()
        self._sleeps = False
        self._broken: BaseException | None = None
        self._busy = False
        self._idle_events: list[Event] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], Any], *, waits: Sequence[Event] = (), label: int = -1
    ) -> Event:
        """See `Stream`."""
        event = Event()
        with self._lock:
            broken = self._broken
            if broken is None:
                self._queue.append(Item(work, waits, event, label))
                if self._sleeps:
                    self._sleeps = False
                    self._work_is_here.release()
        if broken is not None:
            event.fail(broken)
        return event

    def cancel(self, error: BaseException | None = None) -> None:
        """See `Stream`."""
        with self._lock:
            if self._broken is None:
                self._broken = error or GenerationClosed("the generation is over")
            dropped, self._queue = self._queue, deque()
            idle = self._take_idle_events() if not self._busy else []
        self._fail(dropped, self._broken)
        for event in idle:
            event.set()

    def _fail(self, dropped: Sequence[Item], error: BaseException) -> None:
        """Fail the events of all; a callback that raises, a bug, goes to the log of the process."""
        for item in dropped:
            try:
                item.event.fail(error)
            except BaseException:  # the stream is broken already, by an error that is told
                traceback.print_exc()

    @property
    def position(self) -> int:
        """See `Stream`."""
        return self._position

    @property
    def is_waiting(self) -> bool:
        """See `Stream`."""
        return self._is_waiting

    def reset(self) -> None:
        """See `Stream`."""
        with self._lock:
            assert not self._busy, "reset of a busy stream"
            assert not self._queue, "reset of a stream with work"
            self._broken = None

    def when_idle(self) -> Event:
        """See `Stream`."""
        event = Event()
        with self._lock:
            if self._busy or self._queue:
                self._idle_events.append(event)
                return event
        event.set()
        return event

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing is queued."""
        with self._lock:
            return not self._busy and not self._queue

    def _take_idle_events(self) -> list[Event]:
        events, self._idle_events = self._idle_events, []
        return events

    def _next(self) -> Item:
        while True:
            with self._lock:
                if self._queue:
                    self._busy = True
                    return self._queue.popleft()
                self._busy = False
                self._sleeps = True
                idle = self._take_idle_events()
            for event in idle:
                event.set()
            self._work_is_here.acquire()

    def _run(self) -> None:
        while True:
            item = self._next()
            self._position = item.label
            try:
                self._do(item)
            except BaseException as error:  # of a callback
                traceback.print_exc()
                self._break(error)
            self._position = -1
            del item

    def _do(self, item: Item) -> None:
        try:
            self._wait_for(item.waits)
            if self._broken is not None:
                raise self._broken
            result = self._execute(item)
        except BaseException as error:  # the event carries it to whoever waits
            try:
                self._break(error)
            finally:
                item.event.fail(error)
        else:
            item.event.set(result)

    def _wait_for(self, waits: Sequence[Event]) -> None:
        for event in waits:
            if not event.done or event.error is not None:
                self._is_waiting = True
                try:
                    event.wait()
                finally:
                    self._is_waiting = False

    def _execute(self, item: Item) -> Any:
        """Do the work, with its start and end observed; its events have happened."""
        observation = self.observation
        if observation is None or item.label < 0:
            return item.work()
        observation.began(item.label, time.monotonic_ns())
        result = item.work()
        observation.ended(item.label, time.monotonic_ns())
        return result

    def _break(self, error: BaseException) -> None:
        is_news = self._broken is None
        self.cancel(error)
        if is_news and self.on_error is not None:
            self.on_error(error)
