"""A device that runs behind the host, made of threads: what CUDA streams promise, and no more.

Kernels are functions. `launch` queues one on the queue that is active on this thread; each queue
runs its own in order, on a thread of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_active = threading.local()


def launch(kernel: Callable[[], None]) -> None:
    """Queue `kernel` on the active queue; returns at once."""
    _active.queue.put(kernel)


def _must(happened: bool) -> None:
    assert happened, "the device hangs"


class SlowMark:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self._at_ns = 0
        self.num_waits = 0
        """How often the host waited here."""

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        self.num_waits += 1
        _must(self.reached.wait(20.0))

    def reach(self) -> None:
        self._at_ns = time.monotonic_ns()
        self.reached.set()

    def at_ns(self) -> int:
        assert self.reached.is_set(), "asked when, before it happened"
        return self._at_ns


class SlowQueue:
    """A `DeviceQueue`."""

    def __init__(self) -> None:
        self.waited: list[SlowMark] = []
        self.used: list[Any] = []
        self.num_meetings = 0
        self._num_queued = 0
        self._lock = threading.Lock()
        self._kernels: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, kernel: Callable[[], None]) -> None:
        with self._lock:
            self._num_queued += 1
        self._kernels.put(kernel)

    def _run(self) -> None:
        while (kernel := self._kernels.get()) is not None:
            with self._lock:
                self._num_queued -= 1
            kernel()

    def close(self) -> None:
        self._kernels.put(None)
        self._thread.join(20.0)

    @contextmanager
    def active(self) -> Iterator[None]:
        before = getattr(_active, "queue", None)
        _active.queue = self
        try:
            yield
        finally:
            _active.queue = before

    def record(self) -> SlowMark:
        mark = SlowMark()
        self.put(mark.reach)
        return mark

    def wait(self, mark: Any) -> None:
        self.waited.append(mark)
        self.put(lambda: _must(mark.reached.wait(20.0)))

    def uses(self, result: Any) -> None:
        self.used.append(result)

    def meet_host(self) -> None:
        assert not self._num_queued, "compares clocks with work queued"
        self.num_meetings += 1

    def synchronize(self) -> None:
        self.record().synchronize()


class SlowPair:
    """A directed pair of ranks: a message is copied once both ends have come to it, as on NCCL."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[list[int]] = queue.SimpleQueue()


class SlowLink:
    """One end of a pair (a `Link`); tensors are lists that kernels fill."""

    def __init__(self, pair: SlowPair) -> None:
        self.queue = SlowQueue()
        self._pair = pair

    def send(self, tensor: list[int]) -> None:
        launch(lambda: self._pair.messages.put(list(tensor)))

    def receive(self, num_bytes: int) -> list[int]:
        buffer = [0] * num_bytes
        launch(lambda: buffer.__setitem__(slice(None), self._pair.messages.get(timeout=20.0)))
        return buffer

    def next(self) -> list[int]:
        """Block the host until the next message is here."""
        return self._pair.messages.get(timeout=20.0)
