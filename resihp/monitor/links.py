"""The coordinator's connections to the monitors of all nodes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from resihp.errors import WireError
from resihp.monitor.node.brief import Brief
from resihp.wire.auth import Identity
from resihp.wire.channel import connect_handshake
from resihp.wire.gate import notice_silence
from resihp.wire.nodes import NodeChannel, NodeMessage, RunAt
from resihp.wire.timing import Timing

__all__ = ["Hearer", "Links"]

RETRY_S = 0.05


class Hearer(Protocol):
    """Who is told what happens on the connections, with the number of the node."""

    def reached(self, node: int) -> None:
        """A connection is there."""
        ...

    def lost(self, node: int) -> None:
        """It broke."""
        ...

    def refused(self, node: int) -> None:
        """Nobody listens there."""
        ...

    def hear(self, node: int, message: NodeMessage) -> None:
        """A message of the node's monitor."""
        ...


class Links:
    """Dials every monitor, and again whenever a connection is lost, until closed."""

    def __init__(self, brief: Brief, timing: Timing, run_dir: str, hearer: Hearer) -> None:
        self._brief = brief
        self._timing = timing
        self._run_dir = run_dir
        self._hearer = hearer
        name = brief.job_config().job.name
        self._identity = Identity(name, "coordinator", brief.node, 0)
        self._channels: dict[int, NodeChannel] = {}

    @property
    def nodes(self) -> range:
        """All nodes of the job."""
        return range(len(self._brief.addresses))

    @property
    def connected(self) -> frozenset[int]:
        """Nodes whose monitor we are connected to."""
        return frozenset(self._channels)

    def send(self, node: int, message: NodeMessage) -> None:
        """To the monitor of `node`; dropped where there is no connection."""
        if node in self._channels:
            self._channels[node].send(message)

    async def drain(self, timeout_s: float) -> None:
        """Let what was sent go out."""
        for channel in list(self._channels.values()):
            await channel.drain(timeout_s)

    async def keep(self, node: int) -> None:
        """Be connected to `node`, until cancelled. What the hearer raises is a bug, and raised."""
        while True:
            try:
                channel = await self._dial(node)
            except ConnectionRefusedError:
                self._hearer.refused(node)
            except (OSError, WireError, TimeoutError):
                pass  # the next attempt shows whether it lasts
            else:
                await self._listen(node, channel)
            await asyncio.sleep(RETRY_S)

    async def _dial(self, node: int) -> NodeChannel:
        host, port = self._brief.addresses[node]
        async with asyncio.timeout(self._timing.handshake_s):
            reader, writer = await asyncio.open_connection(host, port)
        try:
            seals = await connect_handshake(
                reader,
                writer,
                self._brief.secret,
                self._identity,
                timeout_s=self._timing.handshake_s,
            )
            notice_silence(writer.get_extra_info("socket"), self._timing.handshake_s)
        except BaseException:
            writer.close()
            raise
        return NodeChannel(reader, writer, seals)

    async def _listen(self, node: int, channel: NodeChannel) -> None:
        """Tell the hearer what comes, until the connection breaks or is not to be trusted."""
        try:
            channel.send(RunAt(run_dir=self._run_dir))
            self._channels[node] = channel
            self._hearer.reached(node)
            try:
                with contextlib.suppress(WireError):
                    while (message := await _next(channel)) is not None:
                        self._hearer.hear(node, message)
            finally:
                del self._channels[node]
                self._hearer.lost(node)
        finally:
            channel.close()


async def _next(channel: NodeChannel) -> NodeMessage | None:
    """The next message; None where the connection is gone, however it went."""
    try:
        return await channel.receive()
    except OSError:
        return None
