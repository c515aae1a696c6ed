"""What the coordinator and the monitor of a node say to each other.

A monitor relays between the supervisors of its node and the coordinator: messages of
`resihp.wire.messages` travel as payloads inside these, as the supervisor or the coordinator
encoded them. So the coordinator has one connection per node, and one beat of it per period.
"""

from __future__ import annotations

import asyncio

import msgspec

from resihp.errors import FrameError
from resihp.wire.auth import Seal
from resihp.wire.channel import FrameChannel
from resihp.wire.framing import CONTROL_LIMIT_BYTES
from resihp.wire.messages import Beat
from resihp.wire.quorum import QuorumMessage

__all__ = [
    "Drained",
    "Ended",
    "EvictRank",
    "FromOperator",
    "FromRank",
    "JournalRefused",
    "NodeBeat",
    "NodeChannel",
    "NodeMessage",
    "RankGone",
    "RunAt",
    "StopAsked",
    "ToOperator",
    "ToRanks",
    "TurnedAway",
]

_ENVELOPE_BYTES = 64 << 10
"""Room for what goes around a payload."""


class _NodeMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages between coordinator and monitor."""


# --- monitor -> coordinator


class NodeBeat(_NodeMessage, frozen=True, kw_only=True):
    """Liveness of the node: the newest beat of each rank that beat since the last one of these."""

    number: int
    beats: dict[int, Beat]


class FromRank(_NodeMessage, frozen=True, kw_only=True):
    """A message of a rank of this node."""

    rank: int
    payload: bytes


class RankGone(_NodeMessage, frozen=True, kw_only=True):
    """The supervisor of a rank is gone, and with it (by the kernel) its executor."""

    rank: int
    evidence: str
    seen_s: float | None = None
    """When its monitor saw its end; None: it never came."""


class FromOperator(_NodeMessage, frozen=True, kw_only=True):
    """A request of an operator; `number` goes back with the answer."""

    number: int
    payload: bytes


class StopAsked(_NodeMessage, frozen=True, kw_only=True):
    """A process of the node was told by a signal to end the job."""

    reason: str
    exit_code: int


class TurnedAway(_NodeMessage, frozen=True, kw_only=True):
    """A connection to the node's socket was refused."""

    why: str
    refused_so_far: int


class JournalRefused(_NodeMessage, frozen=True, kw_only=True):
    """The node's disk does not take what it would promise or accept: it has no vote until then."""

    why: str


class Drained(_NodeMessage, frozen=True, kw_only=True):
    """The job is over, and no supervisor of this node is left."""


# --- coordinator -> monitor


class RunAt(_NodeMessage, frozen=True, kw_only=True):
    """The first message: where the run's directory is."""

    run_dir: str


class ToRanks(_NodeMessage, frozen=True, kw_only=True):
    """A message for some ranks of this node."""

    ranks: tuple[int, ...]
    payload: bytes


class EvictRank(_NodeMessage, frozen=True, kw_only=True):
    """SIGKILL the supervisor of a rank; the kernel kills its executor with it."""

    rank: int


class ToOperator(_NodeMessage, frozen=True, kw_only=True):
    """The answer to request `number`."""

    number: int
    payload: bytes


class Ended(_NodeMessage, frozen=True, kw_only=True):
    """The job is over: let all supervisors end, also those that come later.

    A monitor that has ended says it, too, to a coordinator that asks for the lead.
    """

    exit_code: int
    reason: str
    was_over: bool = False
    """A monitor said so: then it holds, whoever passes it on."""
    lost_nodes: tuple[int, ...] = ()
    """Nodes that were given up: nobody there will say that it has ended."""


NodeMessage = (
    NodeBeat
    | FromRank
    | RankGone
    | FromOperator
    | StopAsked
    | TurnedAway
    | JournalRefused
    | Drained
    | RunAt
    | ToRanks
    | EvictRank
    | ToOperator
    | Ended
    | QuorumMessage
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(NodeMessage)


class NodeChannel(FrameChannel):
    """One connection between a coordinator and a monitor."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seals: tuple[Seal, Seal]
    ) -> None:
        super().__init__(reader, writer, seals, limit_bytes=CONTROL_LIMIT_BYTES + _ENVELOPE_BYTES)

    def send(self, message: NodeMessage) -> None:
        """Queue a message; a closed connection drops it (the reader reports the loss)."""
        self.send_payload(_encoder.encode(message))

    async def receive(self) -> NodeMessage | None:
        """The next message, None when the peer is gone. FrameError, AuthError: do not trust it."""
        payload = await self.receive_payload()
        if payload is None:
            return None
        try:
            return _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(f"not a message between monitor and coordinator: {error}") from error
