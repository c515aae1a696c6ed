"""The monitor process: `python -m resihp.monitor.node LISTENER BRIEF NOTE PULSE`.

Its owner starts it. All four are inherited descriptors.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

import msgspec

from resihp.errors import JournalDamaged
from resihp.monitor.node.brief import NoteFile, read_brief
from resihp.monitor.node.server import NodeServer
from resihp.monitor.process import ENDINGS
from resihp.monitor.pulse import Pulse
from resihp.wire.clock import MonotonicClock
from resihp.wire.console import complain
from resihp.wire.loop import run


async def _run(listen_fd: int, brief_fd: int, note_fd: int, pulse_fd: int) -> int:
    listener = socket.socket(fileno=listen_fd)
    note = NoteFile(note_fd)
    try:
        server = NodeServer(read_brief(brief_fd), brief_fd, note, MonotonicClock())
    except JournalDamaged as error:
        # The next monitor would read the same: this is the end of the node, not of the others.
        complain(f"resihp: error: {error}")
        ended = {"exit_code": error.exit_code, "reason": str(error)}
        note.write(msgspec.structs.replace(note.read(), **ended))
        return error.exit_code
    loop = asyncio.get_running_loop()
    for number in ENDINGS:
        loop.add_signal_handler(number, _stop, server, number)
    # The owner started us with both blocked, so that none could come too early.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    beating = asyncio.create_task(Pulse(pulse_fd).keep(server.beat_s))
    try:
        return await server.serve(listener)
    finally:
        beating.cancel()


def _stop(server: NodeServer, number: signal.Signals) -> None:
    server.ask_stop(f"stopped by {number.name}", 128 + number)


if __name__ == "__main__":
    code = run(_run(*map(int, sys.argv[1:5])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
