"""The supervisors of a node, as its monitor holds them: connections, processes, evictions."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

from resihp.monitor.node.roster import Roster
from resihp.monitor.process import ProcessHandle, is_stopped
from resihp.wire.channel import Channel
from resihp.wire.clock import Clock
from resihp.wire.messages import AskStop, Beat, Hello, Message, decode
from resihp.wire.nodes import FromRank, NodeBeat, NodeMessage, RankGone
from resihp.wire.timing import Timing

__all__ = ["Supervisors"]


class Supervisors:
    """Of the ranks of one node. `tell` goes to the coordinator, `on_message` comes first."""

    def __init__(
        self,
        ranks: Iterable[int],
        timing: Timing,
        clock: Clock,
        *,
        was_restarted: bool,
        tell: Callable[[NodeMessage], None],
        on_message: Callable[[Message], bool],
    ) -> None:
        """`on_message` returns whether a message was for the monitor itself."""
        self._ranks = frozenset(ranks)
        self._clock = clock
        self._tell = tell
        self._on_message = on_message
        self._roster = Roster(ranks, timing, clock.now_s(), was_restarted=was_restarted)
        self._channels: dict[int, Channel] = {}
        self._handles: dict[int, ProcessHandle] = {}
        self._evidence: dict[int, str] = {}
        """Why we are about to close the connection of a rank."""
        self._gone_s: dict[int, float] = {}
        """When the connection of a rank was closed the last time."""

    def __bool__(self) -> bool:
        """Whether any is there."""
        return bool(self._channels)

    def why_not(self, rank: int) -> str | None:
        """Why a supervisor of `rank` is not welcome; None: it is."""
        if rank in self._channels:
            return f"rank {rank} is here already"
        return None if rank in self._ranks else f"no place for rank {rank}"

    async def serve(self, rank: int, channel: Channel, welcome: Iterable[Message]) -> None:
        """One connection, to its end. FrameError, AuthError: the peer is not to be trusted."""
        self._channels[rank] = channel
        self._roster.connected(rank, self._clock.now_s())
        for message in welcome:
            channel.send(message)
        try:
            while (payload := await channel.receive_payload()) is not None:
                self._hear(rank, decode(payload), payload)
        finally:
            del self._channels[rank]
            evidence = self._evidence.pop(rank, "its supervisor is gone")
            self._roster.disconnected(rank, evidence)
            self._gone_s[rank] = self._clock.now_s()
            self._tell_gone(rank)
            if rank in self._handles:
                self._handles.pop(rank).close()

    def _hear(self, rank: int, message: Message, payload: bytes) -> None:
        is_beat = isinstance(message, Beat)
        self._roster.heard(rank, self._clock.now_s(), message if is_beat else None)
        if is_beat or (isinstance(message, AskStop) and self._on_message(message)):
            return
        if isinstance(message, Hello) and rank not in self._handles:
            self._handles[rank] = ProcessHandle(message.pid)
        self._tell(FromRank(rank=rank, payload=payload))
        self._on_message(message)

    def send(self, ranks: Iterable[int], payload: bytes) -> None:
        """To those of `ranks` that are there."""
        for rank in ranks:
            if rank in self._channels:
                self._channels[rank].send_payload(payload)

    def broadcast(self, message: Message) -> None:
        """To all that are there."""
        for channel in self._channels.values():
            channel.send(message)

    def evict(self, rank: int, evidence: str = "its supervisor was evicted") -> None:
        """Kill a supervisor, and take it for gone even where it cannot be killed."""
        if rank in self._channels:
            self._evidence[rank] = evidence
            if rank in self._handles:
                self._handles[rank].send(signal.SIGKILL)
            self._channels[rank].close()

    def tell_gone(self) -> None:
        """Say again who is gone: the coordinator is a new one."""
        for rank in self._roster.gone:
            self._tell_gone(rank)

    def _tell_gone(self, rank: int) -> None:
        evidence, seen_s = self._roster.gone[rank], self._gone_s.get(rank)
        self._tell(RankGone(rank=rank, evidence=evidence, seen_s=seen_s))

    def tick(self, number: int) -> NodeBeat:
        """Once per beat: who is stopped, silent or missed; the beat of this node."""
        now_s = self._clock.now_s()
        self._roster.tick(now_s)
        stopped = [rank for rank, handle in self._handles.items() if is_stopped(handle.pid)]
        for rank, evidence in self._roster.to_kill(stopped, now_s).items():
            self.evict(rank, evidence)
        for rank in self._roster.missed(now_s):
            self._tell_gone(rank)
        return NodeBeat(number=number, beats=self._roster.take_beats())
