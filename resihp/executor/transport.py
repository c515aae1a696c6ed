"""Point-to-point tensors between executors, over framed TCP on the event loop.

One connection per directed rank pair, opened by the sender and authenticated once for
(sender, receiver, generation). Each payload frame is a fixed header (generation, tag, length)
and the raw bytes. Frames of one connection arrive in the order they were posted; the receiver
finds them by tag, so a late `receive` never blocks another message. A lost connection fails
every pending receive from that peer at once.

Its progress is at least that of `resihp.wire.backend.EXECUTOR_TRANSPORT`, which plans are
verified under.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from typing import NamedTuple

from torch import Tensor

from resihp.errors import AuthError, GenerationClosed, PeerLost, WireError
from resihp.executor.flat import bytes_of
from resihp.executor.stream import Event
from resihp.wire.address import LOOPBACK
from resihp.wire.auth import Identity
from resihp.wire.channel import accept_handshake, connect_handshake, connection_lost

__all__ = ["STATE", "Tag", "Transport"]

_HEADER = struct.Struct("!IBIHIHQ")  # generation, kind, step, home, micro-batch, chunk, bytes
MAX_UNCLAIMED_BYTES = 1 << 30
"""How much a peer may send ahead of our receives before it is taken for broken."""
RETRY_S = 0.01
"""Pause before a peer that has not begun the generation yet is asked again."""


class Tag(NamedTuple):
    """What a payload is. `kind` is an `Op` number, or STATE for resharding."""

    kind: int
    step: int
    home: int
    microbatch: int
    chunk: int


STATE = 255
"""`Tag.kind` of a piece of state; every other kind is the number of an `Op`."""


class _Mailbox:
    """What one peer sent and what we still wait for from it."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.arrived: dict[Tag, bytearray] = {}
        self.waiting: dict[Tag, Event] = {}
        self.connected = False
        self.lost: BaseException | None = None
        self.unclaimed_bytes = 0


class Transport:
    """All connections of one executor. Methods are for the event loop's thread, but `receive`.

    `open` listens on the loopback interface for the life of the process; `begin` and `end`
    bracket one generation.
    """

    def __init__(self, job: str, rank: int, *, timeout_s: float) -> None:
        self._job = job
        self._rank = rank
        self._timeout_s = timeout_s
        self._generation = 0
        self._key = b""
        self._ports: dict[int, int] = {}
        self._lock = threading.Lock()
        self._mailboxes: dict[int, _Mailbox] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.num_refused = 0
        """Connections that were turned away, over all generations."""

    async def open(self) -> int:
        """Listen; the port. Connections are served until `close`."""
        self._server = await asyncio.start_server(self._accept, LOOPBACK, 0, limit=1 << 20)
        return self._server.sockets[0].getsockname()[1]

    def begin(self, generation: int, key: bytes, ports: dict[int, int]) -> None:
        """Start a generation: from now on its peers (all of `ports`) may connect."""
        self.end()
        with self._lock:
            self._mailboxes = {peer: _Mailbox(peer) for peer in ports}
        self._generation, self._key, self._ports = generation, key, ports

    def end(self) -> None:
        """End the generation: every pending receive fails, every connection is closed."""
        with self._lock:
            mailboxes, self._mailboxes = self._mailboxes, {}
        self._key, self._ports = b"", {}
        for mailbox in mailboxes.values():
            _fail_all(mailbox, GenerationClosed("the generation is over"))
        for task in self._readers:
            task.cancel()
        for writer in self._writers.values():
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        """End the generation and stop listening."""
        self.end()
        if self._server is not None:
            self._server.close()

    # --- sending

    async def connect(self, peers: set[int]) -> None:
        """Open the connections to all `peers` that have none yet.

        Peers that have not begun this generation yet are waited for. Raises an ExceptionGroup of
        PeerLost where one does not answer, of GenerationClosed where the generation ends.
        """
        async with asyncio.TaskGroup() as tasks:
            for peer in sorted(peers - self._writers.keys()):
                tasks.create_task(self._connect(peer))

    async def _connect(self, peer: int) -> None:
        generation, ports = self._generation, self._ports
        deadline_s = time.monotonic() + self._timeout_s
        while peer in ports and self._ports is ports:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._connect_once(peer, ports)
                return
            except AuthError as error:
                if time.monotonic() > deadline_s:
                    raise _not_accepted(peer, generation) from error
                await asyncio.sleep(RETRY_S)
            except (OSError, WireError) as error:
                raise _not_accepted(peer, generation) from error
        raise GenerationClosed("the generation is over")

    async def _connect_once(self, peer: int, ports: dict[int, int]) -> None:
        identity = Identity(self._job, "executor", self._rank, self._generation)
        reader, writer = await asyncio.open_connection(LOOPBACK, ports[peer])
        try:
            await connect_handshake(reader, writer, self._key, identity, timeout_s=self._timeout_s)
            if self._ports is not ports:
                raise GenerationClosed("the generation is over")
        except BaseException:
            writer.transport.abort()
            raise
        self._writers[peer] = writer

    def send(self, peer: int, tag: Tag, tensor: Tensor) -> None:
        """Post `tensor` (contiguous, on CPU) to `peer`; returns at once.

        The tensor must not change until it is sent; nothing here copies it before that.
        """
        writer = self._writers.get(peer)
        if writer is None or writer.is_closing():
            return  # the loss is seen by the peer's supervisor; our receives fail by themselves
        payload = bytes_of(tensor)
        writer.write(_HEADER.pack(self._generation, *tag, len(payload)))
        writer.write(payload)

    # --- receiving

    def receive(self, peer: int, tag: Tag) -> Event:
        """An event whose result is the payload (bytearray) that `peer` sends under `tag`."""
        event = Event()
        with self._lock:
            mailbox = self._mailboxes.get(peer)
            if mailbox is None:
                event.fail(GenerationClosed("the generation is over"))
                return event
            payload = mailbox.arrived.pop(tag, None)
            if payload is not None:
                mailbox.unclaimed_bytes -= len(payload)
                event.set(payload)
            elif mailbox.lost is not None:
                event.fail(mailbox.lost)
            else:
                mailbox.waiting[tag] = event
        return event

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            mailbox = await self._authenticate(reader, writer)
            await self._read(mailbox, reader)
        except asyncio.CancelledError:
            pass  # `end` cancelled us: the generation is over
        except Exception as error:
            self.num_refused += 1
            if not connection_lost(error):
                raise
        finally:
            self._readers.discard(task)
            writer.transport.abort()

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Mailbox:
        def admit(identity: Identity) -> str | None:
            if (identity.job, identity.role) != (self._job, "executor"):
                return "not an executor of this job"
            if identity.generation != self._generation or identity.rank not in self._ports:
                return f"not a member of generation {self._generation}"
            return None

        identity, _, _ = await accept_handshake(
            reader, writer, self._key, admit, timeout_s=self._timeout_s
        )
        mailbox = self._mailboxes[identity.rank]
        if mailbox.connected:
            raise AuthError(f"rank {identity.rank} is connected already")
        mailbox.connected = True
        return mailbox

    async def _read(self, mailbox: _Mailbox, reader: asyncio.StreamReader) -> None:
        peer = mailbox.peer
        try:
            while True:
                header = await reader.readexactly(_HEADER.size)
                generation, *tag, length = _HEADER.unpack(header)
                if generation != self._generation:
                    raise AuthError(f"payload of generation {generation}")
                if length > MAX_UNCLAIMED_BYTES - mailbox.unclaimed_bytes:
                    raise AuthError(f"rank {peer} sends more than it may: {length} bytes")
                payload = bytearray(await reader.readexactly(length))
                self._deliver(mailbox, Tag(*tag), payload)
        except (asyncio.IncompleteReadError, ConnectionError, WireError) as error:
            lost = PeerLost(f"the connection from rank {peer} broke")
            lost.__cause__ = error
            with self._lock:
                mailbox.lost = lost
            _fail_all(mailbox, lost)

    def _deliver(self, mailbox: _Mailbox, tag: Tag, payload: bytearray) -> None:
        with self._lock:
            event = mailbox.waiting.pop(tag, None)
            if event is None:
                if tag in mailbox.arrived:
                    raise AuthError(f"second payload under {tag}")
                mailbox.arrived[tag] = payload
                mailbox.unclaimed_bytes += len(payload)
        if event is not None:
            event.set(payload)


def _not_accepted(peer: int, generation: int) -> PeerLost:
    return PeerLost(f"rank {peer} does not accept generation {generation}")


def _fail_all(mailbox: _Mailbox, error: BaseException) -> None:
    waiting, mailbox.waiting = mailbox.waiting, {}
    for event in waiting.values():
        event.fail(error)
