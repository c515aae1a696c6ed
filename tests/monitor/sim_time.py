"""Virtual time, and processes that may die or be stopped and continued in it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

from resihp.wire.clock import ManualClock

Work = Callable[[], object]


class Timeline:
    """What happens when; one seed, one story."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self._queue: list[tuple[float, int, Work]] = []
        self._numbers = itertools.count()

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    def delay(self, scale: float = 1.0) -> float:
        """Mostly milliseconds, now and then much longer."""
        slow = 20.0 if self.random.random() < 0.03 else 1.0
        return self.random.uniform(0.001, 0.02) * scale * slow

    def at(self, at_s: float, work: Work) -> None:
        heapq.heappush(self._queue, (max(at_s, self.now_s), next(self._numbers), work))

    def after(self, seconds: float, work: Work) -> None:
        self.at(self.now_s + seconds, work)

    def run(self, is_over: Callable[[], bool], limit_s: float) -> None:
        """Until it is over; AssertionError where that takes longer than `limit_s`."""
        while not is_over():
            at_s, _, work = heapq.heappop(self._queue)
            assert at_s < limit_s, f"no end after {limit_s} s"
            self.clock.advance(max(0.0, at_s - self.now_s))
            work()


class Process:
    """Does things later, unless it is dead by then; not while it is stopped."""

    def __init__(self, time: Timeline, host: Process | None = None) -> None:
        """`host`: what it runs on. It is stopped with that, but does not die with it by itself."""
        self.time = time
        self.host = host
        self.dead = False
        self._stopped = False
        self._waiting: list[Work] = []

    @property
    def is_stopped(self) -> bool:
        return self._stopped or (self.host is not None and self.host.is_stopped)

    def soon(self, work: Work, scale: float = 1.0) -> None:
        """After a while."""
        self.later(self.time.delay(scale), work)

    def later(self, seconds: float, work: Work) -> None:
        self.time.after(seconds, lambda: self.do(work))

    def every(self, seconds: float, work: Work) -> None:
        """From now on, for ever."""

        def due() -> None:
            work()
            self.later(seconds, due)

        self.later(seconds * self.time.random.random(), due)

    def do(self, work: Work) -> None:
        """Now, or as soon as it is continued."""
        if self.dead:
            return
        if not self.is_stopped:
            work()
        elif self._stopped or self.host is None:
            self._waiting.append(work)
        else:
            self.host.do(lambda: self.do(work))

    def stop(self) -> None:
        """SIGSTOP."""
        self._stopped = True

    def go_on(self) -> None:
        """SIGCONT: all that was due meanwhile happens now, in order."""
        self._stopped = False
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            self.time.at(self.time.now_s, lambda work=work: self.do(work))
