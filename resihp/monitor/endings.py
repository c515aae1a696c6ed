"""SIGINT and SIGTERM of a process with a job: the first ends it in order, the second at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from resihp.monitor.process import ENDINGS

__all__ = ["Endings"]


class Endings:
    """Handles both signals on the running loop, from now on."""

    def __init__(self, ask: Callable[[signal.Signals], None], at_once: Callable[[], None]) -> None:
        """`ask` asks for the end in order; `at_once` is all that is done before this process ends
        by itself."""
        self._ask = ask
        self._at_once = at_once
        self.first: signal.Signals | None = None
        """The signal that asked for the end."""
        loop = asyncio.get_running_loop()
        for number in ENDINGS:
            loop.add_signal_handler(number, self._came, number)
        # Whoever started us may have blocked both, so that none could come too early.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)

    def code(self, otherwise: int) -> int:
        """The exit code: of a process that a signal ended, or `otherwise`."""
        return otherwise if self.first is None else 128 + self.first

    def end(self) -> None:
        """Do not wait for the end in order any longer."""
        self._at_once()
        os._exit(self.code(1))

    def _came(self, number: signal.Signals) -> None:
        if self.first is not None:
            self.end()
        self.first = number
        self._ask(number)
