"""The coordinator's connections to the monitors of all nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from resihp.errors import WireError
from resihp.monitor.node.brief import Brief
from resihp.wire.auth import Identity
from resihp.wire.channel import connect_handshake
from resihp.wire.gate import notice_silence
from resihp.wire.nodes import NodeChannel, NodeMessage, RunAt
from resihp.wire.timing import Timing

__all__ = ["Links"]

RETRY_S = 0.05


class Links:
    """Dials every monitor, and again whenever a connection is lost, until closed."""

    def __init__(
        self,
        brief: Brief,
        term: int,
        job_name: str,
        timing: Timing,
        *,
        run_dir: str,
        hear: Callable[[int, NodeMessage], None],
        reached: Callable[[int], None],
        lost: Callable[[int, str], None],
    ) -> None:
        """`reached` and `lost` are told of connections, `hear` of messages, with the node."""
        self._brief = brief
        self._identity = Identity(job_name, "coordinator", brief.node, term)
        self._timing = timing
        self._run_dir = run_dir
        self._hear = hear
        self._reached = reached
        self._lost = lost
        self._channels: dict[int, NodeChannel] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Begin to dial."""
        nodes = range(len(self._brief.addresses))
        self._tasks = [asyncio.create_task(self._keep(node)) for node in nodes]

    @property
    def connected(self) -> frozenset[int]:
        """Nodes whose monitor we are connected to."""
        return frozenset(self._channels)

    def send(self, node: int, message: NodeMessage) -> None:
        """To the monitor of `node`; dropped where there is no connection."""
        if node in self._channels:
            self._channels[node].send(message)

    async def close(self, grace_s: float) -> None:
        """Let what was sent go out, and end."""
        for channel in list(self._channels.values()):
            await channel.drain(grace_s)
            channel.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def failed(self) -> None:
        """Return when a task of ours broke, which is a bug; raises what broke it."""
        await asyncio.gather(*self._tasks)

    async def _keep(self, node: int) -> None:
        why = ""
        while True:
            try:
                await self._serve(node)
                why = "its monitor closed the connection"
            except (OSError, WireError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            self._lost(node, why)
            await asyncio.sleep(RETRY_S)

    async def _serve(self, node: int) -> None:
        host, port = self._brief.addresses[node]
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
            channel = NodeChannel(reader, writer, seals)
            channel.send(RunAt(run_dir=self._run_dir))
            self._channels[node] = channel
            self._reached(node)
            while (message := await channel.receive()) is not None:
                self._hear(node, message)
        finally:
            self._channels.pop(node, None)
            writer.close()
