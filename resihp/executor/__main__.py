"""The executor process: `python -m resihp.executor FD`, started by its supervisor only.

FD is an inherited socket. The first message on it names the rank and the job.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable

from resihp.config import JobConfig, loads
from resihp.errors import ResihpError
from resihp.executor.heap import settle_memory
from resihp.executor.runtime import Backend, Executor
from resihp.wire.channel import Channel
from resihp.wire.loop import run
from resihp.wire.messages import Message, Start


async def _run(fd: int) -> int:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    channel = Channel(reader, writer)
    start = await channel.receive()
    if not isinstance(start, Start):
        return 1
    job = loads(start.job)
    return await Executor(job, channel, _backend(job, start, channel.send)).run()


def _backend(job: JobConfig, start: Start, send: Callable[[Message], None]) -> Backend:
    """What the job's devices are. Emulated ones need no torch, which takes seconds to load."""
    if job.device.kind == "emulated":
        from resihp.executor.emulation.backend import EmulatedBackend

        settle_memory()
        return EmulatedBackend(job, start, send)
    from resihp.executor.backend import TrainingBackend

    settle_memory()
    return TrainingBackend(job, start, send)


def main() -> int:
    """Run the executor of this process."""
    # The supervisor decides about our end; a Ctrl-C in the terminal reaches it, not us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return run(_run(int(sys.argv[1])))
    except ResihpError as error:
        if error.__cause__ is not None:  # of the user's own code; the log keeps where
            traceback.print_exception(error.__cause__)
        print(f"resihp: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for a gloo group that is stuck
