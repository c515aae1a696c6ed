"""The owner of a node: holds its listening socket, and keeps a monitor alive until the job ends.

The socket is made once and inherited by every incarnation of the monitor: its port never
changes, connections wait in the kernel while one restarts, and "connection refused" means that
the owner, and with it the node, is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from resihp.monitor.keeper import Keeper
from resihp.monitor.node.brief import Brief, NoteFile, brief_file
from resihp.monitor.process import ENDINGS, Child
from resihp.monitor.pulse import Pulse
from resihp.monitor.run_dir import RunDir
from resihp.wire.timing import Timing

__all__ = ["NodeOwner"]


class NodeOwner:
    """Starts monitors one after the other; `run` returns the exit code of the job."""

    def __init__(self, brief: Brief, listener: socket.socket, timing: Timing) -> None:
        self._brief_fd = brief_file(brief)
        self._note = NoteFile()
        self._listener = listener
        self._run_dir = brief.run_dir
        self._pulse = Pulse()
        self._keeper = Keeper("the monitor of this node", self._start, timing, pulse=self._pulse)
        self._is_left = False
        self._ending: signal.Signals | None = None
        """What the monitor was last told to end the job with."""
        self.lost_nodes: tuple[int, ...] = ()
        """Nodes that were given up, once `run` has returned."""

    async def run(self) -> int:
        """Serve until the job is over. ResihpError where no monitor stays alive."""
        try:
            await self._keeper.run(lambda: self.is_over)
            note = self._note.read()
            assert note.exit_code is not None
            self.lost_nodes = note.lost_nodes
            return note.exit_code
        finally:
            self._leave()

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, perhaps with processes that still have to leave."""
        return self._is_left or self._note.read().exit_code is not None

    @property
    def run_dir(self) -> str | None:
        """Of the run, as far as it is known."""
        if not self._is_left:
            self._run_dir = self._note.read().run_dir or self._run_dir
        return self._run_dir

    def send(self, number: signal.Signals) -> None:
        """Hand a signal to the monitor, which asks for the end of the job; to the next one, too,
        for this one may be dead, or dying."""
        if number in ENDINGS:
            self._ending = number
        self._keeper.send(number)

    def _start(self) -> Child:
        fds = self._listener.fileno(), self._brief_fd, self._note.fd, self._pulse.fd
        monitor = Child(
            [sys.executable, "-m", "resihp.monitor.node", *map(str, fds)],
            env=os.environ,
            pass_fds=fds,
            own_group=True,
            block_signals=True,
        )
        if self._ending is not None:
            monitor.send(self._ending)
        return monitor

    def _leave(self) -> None:
        self._keeper.send(signal.SIGKILL)
        if self.run_dir is not None:
            with contextlib.suppress(OSError):
                RunDir.control_of(self.run_dir).unlink(missing_ok=True)
        self._is_left = True
        os.close(self._brief_fd)
        os.close(self._note.fd)
        os.close(self._pulse.fd)
