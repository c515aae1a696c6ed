"""The coordinator's connections: what breaks one, and what does not stay unseen."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest
from coordinator_cases import SECRET, job_of

from resihp.config import resolved
from resihp.monitor.links import Links
from resihp.monitor.node.brief import Brief
from resihp.wire.auth import Identity
from resihp.wire.gate import Gate
from resihp.wire.nodes import Drained, NodeChannel, NodeMessage
from resihp.wire.timing import Timing

TIMING = Timing.from_detect_within(0.5)


class Hearer:
    """Hears, and fails as it is told to."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.num_reached = 0

    def reached(self, node: int) -> None:
        self.num_reached += 1

    def lost(self, node: int) -> None:
        pass

    def refused(self, node: int) -> None:
        pass

    def hear(self, node: int, message: NodeMessage) -> None:
        if self.error is not None:
            raise self.error


async def keep(hearer: Hearer, num_connections: int) -> None:
    """A monitor that says one thing per connection, until there were so many of them."""
    gate = Gate(SECRET, _admit, timeout_s=TIMING.handshake_s)
    served = 0
    enough = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        _, seals = await gate.prove(reader, writer)
        NodeChannel(reader, writer, seals).send(Drained())
        writer.close()
        served += 1
        if served >= num_connections:
            enough.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        brief = Brief(
            job=resolved(job_of()),
            secret=SECRET,
            node=0,
            addresses=((host, port),),
            run_dir=None,
        )
        async with await asyncio.start_server(serve, sock=listener):
            keeping = asyncio.create_task(Links(brief, TIMING, "/run", hearer).keep(0))
            waiting = asyncio.create_task(enough.wait())
            try:
                await asyncio.wait([keeping, waiting], return_when=asyncio.FIRST_COMPLETED)
                if keeping.done():
                    await keeping
            finally:
                for task in (keeping, waiting):
                    task.cancel()
                await asyncio.gather(keeping, waiting, return_exceptions=True)


def _admit(_: Identity) -> None:
    return None


def test_a_connection_that_breaks_is_made_again():
    """As often as it takes."""
    hearer = Hearer(None)
    asyncio.run(keep(hearer, 3))
    assert hearer.num_reached >= 2


def test_an_error_of_the_hearer_is_not_taken_for_one_of_the_connection():
    """Else what it was about to do would be dropped, and nobody would know."""
    hearer = Hearer(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(keep(hearer, 3))
    assert hearer.num_reached == 1
