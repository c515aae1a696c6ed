"""An event loop in virtual time: instead of waiting it sets its clock forward.

Coroutines run on it unchanged, and whatever waits for a timer takes no time. Where nothing can run
and no timer is set, everybody waits for ever: that is found at once, as `Deadlock`. Only what
happens on the loop itself is seen, so there must be no thread, process or socket to wait for.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from resihp.errors import Deadlock

__all__ = ["BEGIN_S", "VirtualTimeLoop", "run_virtually"]

_T = TypeVar("_T")
BEGIN_S = 1.0
"""Not 0, which observations take for no time at all."""


class _Selector(selectors.DefaultSelector):
    """Hands the time that the loop wants to wait to its clock.

    Files are looked at without waiting, before each step of the clock: the loop has one of its
    own, by which it is woken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = BEGIN_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now; where nothing is, the clock goes on by `timeout`."""
        if timeout is not None and timeout <= 0:
            return []
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Deadlock("nothing can run and no timer is set")
            # Past the timer, whatever has been rounded: at it, the loop would look again for ever.
            now_s = self.now_s + timeout
            self.now_s = now_s + 2 * math.ulp(now_s)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`loop.time()` begins at `BEGIN_S` and is set forward whenever nothing can run."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Virtual seconds."""
        return self._clock.now_s


def run_virtually(main: Coroutine[Any, Any, _T]) -> _T:
    """The result of `main`, run in virtual time. Raises Deadlock where it would wait for ever.

    After a Deadlock what is left is cancelled, as `asyncio.run` does after an error.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
