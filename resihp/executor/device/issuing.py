"""Streams of a device that runs behind the host: a thread issues, the device executes.

An item's event happens when its work has been issued, and carries the mark that the work ends
with. Another stream that uses the result waits for the mark on the device; the issuing threads
wait for each other only, never for the device, but for one thing: an item is issued when the item
`run_ahead` places before it has ended. So the device always has work queued, and the memory of what
is issued but not executed is bounded.

A queue of the device is behind `DeviceQueue`; CUDA's is in `cuda.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from resihp.executor.stream import Event, Item, ThreadStream

if TYPE_CHECKING:
    from resihp.executor.interpreter.observe import Observation

__all__ = ["RUN_AHEAD", "DeviceQueue", "IssuingStream", "Mark"]

RUN_AHEAD = 8
"""Items: with chunks of milliseconds a queue that does not run dry, with few tensors in it."""


class Mark(Protocol):
    """A point in a queue of the device: reached when all before it is done."""

    def query(self) -> bool:
        """Whether it is reached; never blocks."""
        ...

    def synchronize(self) -> None:
        """Block this thread until it is reached."""
        ...

    def at_ns(self) -> int:
        """When it was reached, on the monotonic clock; it is."""
        ...


class DeviceQueue(Protocol):
    """One queue of the device. Its methods queue, and never wait for the device."""

    def active(self) -> AbstractContextManager[Any]:
        """Inside, what this thread issues goes to this queue, and memory comes from its pool."""
        ...

    def record(self) -> Mark:
        """A mark behind all that was queued."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is queued later runs after `mark`, which may be of another queue."""
        ...

    def uses(self, result: Any) -> None:
        """Work of this queue reads `result`, tensors of another queue's pool.

        Their memory is not given to others before this work is done, whoever lets them go.
        """
        ...

    def meet_host(self) -> None:
        """Nothing is queued here: compare the device's clock with the host's, if it is time to."""
        ...

    def synchronize(self) -> None:
        """Block this thread until all that was queued is done."""
        ...


class _Issued(NamedTuple):
    observation: Observation | None
    label: int
    start: Mark
    end: Mark


class IssuingStream(ThreadStream):
    """A `Stream` whose items are issued to `queue`."""

    def __init__(self, name: str, queue: DeviceQueue, *, run_ahead: int = RUN_AHEAD) -> None:
        assert run_ahead > 0
        self.queue = queue
        self._run_ahead = run_ahead
        self._issued: deque[_Issued] = deque()
        self._newest: Mark | None = None
        super().__init__(name)

    @property
    def position(self) -> int:
        """See `Stream`."""
        at = self._device_is_at()
        return self._position if at is None else at.label

    @property
    def is_waiting(self) -> bool:
        """See `Stream`: what an item waits for on the device lies before its start."""
        at = self._device_is_at()
        return self._is_waiting if at is None else not _is_reached(at.start)

    def _device_is_at(self) -> _Issued | None:
        """The first of the issued items that is not done; None where the host is at the next."""
        return next((each for each in tuple(self._issued) if not _is_reached(each.end)), None)

    def _execute(self, item: Item) -> Any:
        self._settle()
        if item.label >= 0 and (self._newest is None or _is_reached(self._newest)):
            self.queue.meet_host()
        with self.queue.active():
            for event in item.waits:
                if event.mark is not None:
                    self.queue.wait(event.mark)
                    self.queue.uses(event.wait())
            if item.label < 0:
                result = item.work()
                self._newest = item.event.mark = self.queue.record()
                return result
            start = self.queue.record()
            result = item.work()
            self._newest = item.event.mark = self.queue.record()
        issued = _Issued(self.observation, item.label, start, item.event.mark)
        self._issued.append(issued)
        return result

    def _settle(self) -> None:
        """Tell the times of what has ended, and let the device come within `run_ahead` items."""
        while self._issued and len(self._issued) >= self._run_ahead:
            self._issued[0].end.synchronize()
            self._tell(self._issued.popleft())
        while self._issued and self._issued[0].end.query():
            self._tell(self._issued.popleft())

    def _tell(self, issued: _Issued) -> None:
        if issued.observation is not None:
            issued.observation.began(issued.label, issued.start.at_ns())
            issued.observation.ended(issued.label, issued.end.at_ns())

    def when_idle(self) -> Event:
        """See `Stream`: nothing is queued on the host, and the device has done what was issued."""
        idle, issued = Event(), super().when_idle()

        def drain() -> None:
            try:
                self.queue.synchronize()
            except RuntimeError as error:  # the device is broken, and says so to whoever waits
                idle.fail(error)
            else:
                idle.set()

        issued.when_done(lambda _: threading.Thread(target=drain, daemon=True).start())
        return idle

    def reset(self) -> None:
        """See `Stream`."""
        self._issued.clear()
        super().reset()


def _is_reached(mark: Mark) -> bool:
    try:
        return mark.query()
    except RuntimeError:  # the device is broken: it says so to whoever waits, not to who looks
        return False
