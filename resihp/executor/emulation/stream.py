"""The stream of an emulated device: a queue whose work says how long it takes.

An item starts when the one before it has ended, what it waits for is there and it was submitted,
all in the time of the device (`clock`). Its work runs then, at once, and tells the stream how long
the device is busy (`EmulatedStream.take`), or that it ends together with others (`meet`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from resihp.errors import GenerationClosed
from resihp.executor.emulation.clock import Clock
from resihp.executor.faults import Lasting
from resihp.executor.stream import Event

if TYPE_CHECKING:
    from resihp.executor.interpreter.observe import Observation

__all__ = ["EmulatedStream", "LocalMeeting", "Meeting"]


class Meeting(Protocol):
    """A rendezvous: it begins when the last of its members has come and ends for all at once.

    It lasts as long as the member says that needs most.
    """

    @property
    def ranks(self) -> Sequence[int]:
        """The members."""
        ...

    @property
    def missing(self) -> set[int]:
        """Members that have not come, as far as it is known here."""
        ...

    @property
    def brought(self) -> int:
        """Bits that its members bring: of those here until it ends, of all from then on."""
        ...

    def bring(self, bits: int) -> None:
        """A member here brings `bits`; before it comes."""
        ...

    def come(self, rank: int, start_ns: int, lasts_ns: int) -> Event:
        """Member `rank` is here, which is of this process; what happens when the meeting ends."""
        ...


class LocalMeeting:
    """A `Meeting` whose members are all in this process."""

    def __init__(self, clock: Clock, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.missing = set(ranks)
        self.brought = 0
        self._clock = clock
        self._start_ns = 0
        self._lasts_ns = 0
        self._ended = Event()

    def bring(self, bits: int) -> None:
        """See `Meeting`."""
        self.brought |= bits

    def come(self, rank: int, start_ns: int, lasts_ns: int) -> Event:
        """See `Meeting`."""
        self.missing.remove(rank)
        self._start_ns = max(self._start_ns, start_ns)
        self._lasts_ns = max(self._lasts_ns, lasts_ns)
        if not self.missing:
            end_ns = self._start_ns + self._lasts_ns
            self._clock.at(end_ns, lambda time_ns: self._ended.set(at_ns=time_ns))
        return self._ended


class _Item(NamedTuple):
    work: Callable[[], Any]
    waits: Sequence[Event]
    event: Event
    label: int
    submitted_ns: int


class EmulatedStream:
    """A queue on a device clock (see `resihp.executor.stream.Stream`), for the loop's thread."""

    def __init__(self, clock: Clock, rank: int = 0) -> None:
        self.position = -1
        self.is_waiting = False
        self.observation: Observation | None = None
        self.on_error: Callable[[BaseException], None] | None = None
        self.slowness = Lasting(1.0)
        """How many times as long its work takes."""
        self.meeting: Meeting | None = None
        """The one that the running item takes part in."""
        self._clock = clock
        self._rank = rank
        self._queue: deque[_Item] = deque()
        self._running: _Item | None = None
        self._result: Any = None
        self._free_ns = 0
        self._lasts_ns = 0
        self._is_held = False
        self._awaited: Event | None = None
        self._broken: BaseException | None = None
        self._idle_events: list[Event] = []

    @property
    def awaited(self) -> Event | None:
        """What the first item of the queue waits for."""
        return self._awaited

    # --- what the work calls

    def take(self, lasts_ns: int) -> None:
        """The running work keeps the device for so long."""
        self._lasts_ns += round(lasts_ns * self.slowness.now)

    def meet(self, meeting: Meeting, lasts_ns: int) -> None:
        """The running work ends with `meeting`, which needs `lasts_ns` once all are there."""
        assert self.meeting is None, "one meeting per item"
        self.meeting = meeting
        self._lasts_ns += round(lasts_ns * self.slowness.now)

    # --- what the interpreter calls

    def submit(
        self, work: Callable[[], Any], *, waits: Sequence[Event] = (), label: int = -1
    ) -> Event:
        """See `Stream`."""
        event = Event()
        if self._broken is not None:
            event.fail(self._broken)
            return event
        # What is queued while the stream is held is there when it is let go.
        submitted_ns = 0 if self._is_held else self._clock.now_ns()
        self._queue.append(_Item(work, waits, event, label, submitted_ns))
        if self._running is None:
            self._advance()
        return event

    @property
    def free_ns(self) -> int:
        """When the last item ended."""
        return self._free_ns

    @property
    def num_queued(self) -> int:
        """Items that have not started."""
        return len(self._queue)

    def hold(self) -> None:
        """Start nothing more until `release`."""
        self._is_held = True

    def release(self, time_ns: int) -> None:
        """Go on as a device that is free, and whose queue is full, since `time_ns`."""
        self._is_held = False
        self._free_ns = max(self._free_ns, time_ns)
        if self._running is None:
            self._advance()

    def cancel(self, error: BaseException | None = None) -> None:
        """See `Stream`. A running item that others are missing for is dropped too."""
        if self._broken is None:
            self._broken = error or GenerationClosed("the generation is over")
        dropped, self._queue = self._queue, deque()
        self._rest()
        if self._running is not None and self.meeting is not None and self.meeting.missing:
            dropped.append(self._running)
            self._running = self.meeting = None
        for item in dropped:
            item.event.fail(self._broken)
        self._tell_idle()

    def reset(self) -> None:
        """See `Stream`."""
        assert self._running is None, "reset of a busy stream"
        assert not self._queue, "reset of a stream with work"
        self._broken = None
        self._is_held = False

    def when_idle(self) -> Event:
        """See `Stream`."""
        event = Event()
        self._idle_events.append(event)
        self._tell_idle()
        return event

    def _tell_idle(self) -> None:
        if self._running is None and not self._queue:
            events, self._idle_events = self._idle_events, []
            for event in events:
                event.set()

    # --- running

    def _advance(self, _: object = None) -> None:
        """Start the first item, or wait for what it needs; nothing runs now."""
        while self._queue and self._running is None:
            item = self._queue[0]
            missing = next((event for event in item.waits if not event.done), None)
            if missing is not None:
                self.position, self.is_waiting = item.label, True
                if missing is not self._awaited:
                    self._awaited = missing
                    missing.when_done(self._advance)
                return
            if self._is_held:
                return
            self._queue.popleft()
            self._rest()
            failed = next((event.error for event in item.waits if event.error is not None), None)
            if failed is not None:
                self._fail(item, failed)
            else:
                self._start(item)
        self._tell_idle()

    def _rest(self) -> None:
        self.position, self.is_waiting, self._awaited = -1, False, None

    def _start(self, item: _Item) -> None:
        start_ns = max(self._free_ns, item.submitted_ns)
        for event in item.waits:
            start_ns = max(start_ns, event.at_ns)
        self._running, self.position = item, item.label
        self._lasts_ns, self.meeting = 0, None
        try:
            self._result = item.work()
        except BaseException as error:  # the event carries it to whoever waits
            self._running = self.meeting = None
            self._rest()
            self._fail(item, error)
            return
        if self.observation is not None and item.label >= 0:
            self.observation.began(item.label, start_ns)

        def end(time_ns: int) -> None:
            # After a `cancel` the running item may be another one.
            if self._running is item:
                self._end(item, time_ns)

        def ended(meeting: Event) -> None:
            if meeting.error is None:
                end(meeting.at_ns)
            elif self._running is item:
                self._running = self.meeting = None
                self._rest()
                self._fail(item, meeting.error)

        if self.meeting is None:
            self._clock.at(start_ns + self._lasts_ns, end)
        else:
            self.meeting.come(self._rank, start_ns, self._lasts_ns).when_done(ended)

    def _end(self, item: _Item, time_ns: int) -> None:
        result, self._result = self._result, None
        self._running = self.meeting = None
        self._free_ns = time_ns
        self._rest()
        if self.observation is not None and item.label >= 0:
            self.observation.ended(item.label, time_ns)
        item.event.set(result, at_ns=time_ns)
        if self._running is None:
            self._advance()

    def _fail(self, item: _Item, error: BaseException) -> None:
        item.event.fail(error)
        is_news = self._broken is None
        self.cancel(error)
        if is_news and self.on_error is not None:
            self.on_error(error)
