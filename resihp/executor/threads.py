"""Blocking work on a thread of its own, awaited."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from resihp.executor.stream import Event

__all__ = ["in_thread"]

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T]) -> _T:
    """The result of blocking `work` on a thread of its own, which may outlive a cancelled wait."""
    event = Event()

    def run() -> None:
        try:
            event.set(work())
        except BaseException as error:  # the event carries it to whoever waits
            event.fail(error)

    threading.Thread(target=run, daemon=True).start()
    return await event.wait_async()
