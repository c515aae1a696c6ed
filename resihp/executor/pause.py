"""Declared pauses: work that legitimately takes longer than an instruction may.

    with pause("compiles kernels", at_most_s=300):
        ...

From any thread, in the executor's own code or in a model of the user's own. Beats carry the pause,
and until it ends, or until it has lasted as long as was declared, nobody calls the rank stalled.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from resihp.errors import UserError
from resihp.wire.messages import Pause

__all__ = ["MAX_PAUSE_S", "announce_pauses", "current_pause", "pause"]

MAX_PAUSE_S = 3600.0
MAX_REASON = 80
_LOCK = threading.Lock()
_ACTIVE: dict[int, tuple[Pause, float]] = {}
"""Each with the moment when it has lasted as long as was declared."""
_NUMBERS = itertools.count(1)
_ANNOUNCERS: list[Callable[[], None]] = []
_ANNOUNCED_WITHIN_S = 1.0


def announce_pauses(beat: Callable[[], None]) -> None:
    """Have `beat` called on the running loop when a pause begins, before its work does.

    What holds the interpreter's lock would else begin before the next beat could tell of it.
    """
    loop = asyncio.get_running_loop()
    thread = threading.get_ident()

    def announce() -> None:
        if threading.get_ident() == thread:
            beat()
            return
        sent = threading.Event()

        def on_loop() -> None:
            beat()
            loop.call_soon(loop.call_soon, sent.set)  # after the loop has written it

        loop.call_soon_threadsafe(on_loop)
        sent.wait(_ANNOUNCED_WITHIN_S)

    _ANNOUNCERS[:] = [announce]


@contextmanager
def pause(reason: str, *, at_most_s: float) -> Generator[None]:
    """Declare that this rank makes no progress for `reason`, for at most `at_most_s` seconds.

    Raises UserError for a duration that is not within `MAX_PAUSE_S`, or no reason.
    """
    if not reason or not 0 < at_most_s <= MAX_PAUSE_S:
        raise UserError(
            f"a pause has a reason and lasts more than 0 and at most {MAX_PAUSE_S:.0f} s, not "
            f"{reason!r} and {at_most_s}"
        )
    number = next(_NUMBERS)
    declared = Pause(number=number, reason=reason[:MAX_REASON], at_most_s=at_most_s)
    with _LOCK:
        _ACTIVE[number] = declared, time.monotonic() + at_most_s
    for announce in _ANNOUNCERS:
        announce()
    try:
        yield
    finally:
        with _LOCK:
            del _ACTIVE[number]


def current_pause() -> Pause | None:
    """Of the pauses that this process is in the one that may last longest; None: in none."""
    with _LOCK:
        if not _ACTIVE:
            return None
        return max(_ACTIVE.values(), key=lambda each: each[1])[0]
