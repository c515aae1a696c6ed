"""Point-to-point tensors between executors, over framed connections on the event loop.

One connection per directed rank pair (a Unix socket within a node, else TCP), opened by the sender
and authenticated once for (sender, receiver, generation). Each payload frame is a fixed header
(generation, tag, length) and the raw bytes. Frames of one connection arrive in the order they
were posted; the receiver finds them by tag, so a late `receive` never blocks another message. A
lost connection fails every pending receive from that peer at once.

Its progress is at least that of `resihp.wire.backend.EXECUTOR_TRANSPORT`, which plans are
verified under.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from resihp.errors import (
    AuthError,
    CommError,
    FrameError,
    GenerationClosed,
    PeerLost,
    WireError,
)
from resihp.executor.device.interface import Tag
from resihp.executor.flat import bytes_of
from resihp.executor.link import FRAME, Incoming, Outgoing, listen_locally, open_link
from resihp.executor.stream import Event
from resihp.wire.address import LOOPBACK, Address, address_of, listen_at
from resihp.wire.auth import Identity
from resihp.wire.gate import MAX_STRANGERS

__all__ = ["Transport"]

MAX_UNCLAIMED_BYTES = 1 << 30
"""How much a peer may send ahead of our receives before it is taken for broken.

What is asked for under its tag and at its size may be as large as it likes.
"""
RETRY_S = 0.01
"""Pause before a peer that has not begun the generation yet is asked again."""


class _Claim(NamedTuple):
    event: Event
    num_bytes: int


class _Mailbox:
    """What one peer sent in one generation and what we still wait for from it."""

    def __init__(self, peer: int, generation: int) -> None:
        self._peer = peer
        self._generation = generation
        self._lock = threading.Lock()
        self._arrived: dict[tuple[int, ...], memoryview] = {}
        self._claims: dict[tuple[int, ...], _Claim] = {}
        self._lost: BaseException | None = None
        self._unclaimed_bytes = 0
        self.link: Incoming | None = None

    def claim(self, tag: Tag, num_bytes: int) -> Event:
        """An event for the payload under `tag`, which is due once; from any thread."""
        claim = _Claim(Event(), num_bytes)
        with self._lock:
            payload = self._arrived.pop(tag, None)
            if payload is not None:
                self._unclaimed_bytes -= len(payload)
            elif self._lost is None:
                assert tag not in self._claims, f"{tag} is asked for twice"
                self._claims[tag] = claim
                return claim.event
        if payload is not None:
            self._hand_over(claim, payload)
        else:
            assert self._lost is not None
            claim.event.fail(self._lost)
        return claim.event

    def _hand_over(self, claim: _Claim, payload: memoryview) -> None:
        if len(payload) == claim.num_bytes:
            claim.event.set(payload)
        else:
            size = f"{len(payload)} bytes came, not {claim.num_bytes}"
            claim.event.fail(CommError(f"from rank {self._peer}: {size}"))

    def allow(self, header: tuple[int, ...]) -> None:
        generation, num_bytes = header[0], header[-1]
        if generation != self._generation:
            raise AuthError(f"payload of generation {generation}")
        with self._lock:
            claim = self._claims.get(header[1:-1])
            is_asked_for = claim is not None and claim.num_bytes == num_bytes
            room = MAX_UNCLAIMED_BYTES - self._unclaimed_bytes
        if not is_asked_for and num_bytes > room:
            raise AuthError(f"rank {self._peer} sends more than it may: {num_bytes} bytes")

    def deliver(self, header: tuple[int, ...], payload: memoryview) -> None:
        tag = header[1:-1]
        with self._lock:
            claim = self._claims.pop(tag, None)
            if claim is None:
                if tag in self._arrived:
                    raise AuthError(f"second payload under {Tag(*tag)}")
                self._arrived[tag] = payload
                self._unclaimed_bytes += len(payload)
        if claim is not None:
            self._hand_over(claim, payload)

    def fail(self, cause: BaseException) -> None:
        lost = PeerLost(f"the connection from rank {self._peer} broke")
        lost.__cause__ = cause
        self._fail(lost)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._lost = error
            claims, self._claims = self._claims, {}
        for claim in claims.values():
            claim.event.fail(error)

    def close(self) -> None:
        """The generation is over."""
        if self.link is not None:
            self.link.close()
        self._fail(GenerationClosed("the generation is over"))


class Transport:
    """All connections of one executor.

    `open` listens at the node's address for the life of the process; `begin` and `end` bracket one
    generation. It is the `Wire` of a CPU device. `send` and `receive` are for any thread,
    everything else for the event loop's.
    """

    def __init__(self, job: str, rank: int, *, timeout_s: float, host: str = LOOPBACK) -> None:
        self._host = host
        self._job = job
        self._rank = rank
        self._timeout_s = timeout_s
        self._generation = 0
        self._key = b""
        self._addresses: Mapping[int, Address] = {}
        self._mailboxes: dict[int, _Mailbox] = {}
        self._links: dict[int, Outgoing] = {}
        self._strangers: dict[Incoming, None] = {}  # the oldest first
        self._servers: list[asyncio.Server] = []
        self.num_refused = 0
        """Connections that were turned away, over all generations."""

    async def open(self) -> Address:
        """Listen; where. Connections are served until `close`. UserError: not our interface."""
        loop = asyncio.get_running_loop()
        listener = listen_at(self._host)
        address = address_of(listener)
        self._host = address.host
        self._servers.append(await loop.create_server(self._stranger, sock=listener))
        local = listen_locally(address)
        if local is not None:
            self._servers.append(await loop.create_unix_server(self._stranger, sock=local))
        return address

    def begin(self, generation: int, key: bytes, addresses: Mapping[int, Address]) -> None:
        """Start a generation: from now on its peers (all of `addresses`) may connect."""
        self.end()
        self._mailboxes = {peer: _Mailbox(peer, generation) for peer in addresses}
        self._generation, self._key, self._addresses = generation, key, addresses

    def end(self) -> None:
        """End the generation: every pending receive fails, every connection is closed."""
        mailboxes, self._mailboxes = self._mailboxes, {}
        links, self._links = self._links, {}
        strangers, self._strangers = self._strangers, {}
        self._key, self._addresses = b"", {}
        for mailbox in mailboxes.values():
            mailbox.close()
        for link in [*links.values(), *strangers]:
            link.close()

    async def close(self) -> None:
        """End the generation and stop listening."""
        self.end()
        for server in self._servers:
            server.close()

    # --- sending

    async def connect(self, peers: AbstractSet[int]) -> None:
        """Open the connections to all `peers` that have none yet.

        Peers that have not begun this generation yet are waited for. Raises an ExceptionGroup of
        PeerLost where one does not answer, of GenerationClosed where the generation ends.
        """
        async with asyncio.TaskGroup() as tasks:
            for peer in sorted(peers - self._links.keys()):
                tasks.create_task(self._connect(peer))

    async def _connect(self, peer: int) -> None:
        generation, addresses = self._generation, self._addresses
        deadline_s = time.monotonic() + self._timeout_s
        while peer in addresses and self._addresses is addresses:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._connect_once(peer, addresses)
                return
            except (AuthError, FrameError, ConnectionResetError, BrokenPipeError) as error:
                # Turned away, or dropped by a peer that began the generation at this moment.
                if time.monotonic() > deadline_s:
                    raise _not_accepted(peer, generation) from error
                await asyncio.sleep(RETRY_S)
            except (OSError, WireError) as error:
                raise _not_accepted(peer, generation) from error
        raise GenerationClosed("the generation is over")

    async def _connect_once(self, peer: int, addresses: Mapping[int, Address]) -> None:
        identity = Identity(self._job, "executor", self._rank, self._generation)
        address = addresses[peer]
        link = await open_link(
            address,
            self._key,
            identity,
            timeout_s=self._timeout_s,
            same_node=address.host == self._host,
        )
        if self._addresses is not addresses:
            link.close()
            raise GenerationClosed("the generation is over")
        self._links[peer] = link

    def send(
        self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
    ) -> Event:
        """Post `cut(result of source)`, a contiguous CPU tensor, as soon as `source` happens.

        The thread that makes `source` happen writes it, as much as the kernel takes at once.
        Nothing is copied: the tensor must not change until the returned event. See `Wire.send`.
        """
        sent = Event()
        link, generation = self._links.get(peer), self._generation
        if link is None:
            sent.fail(GenerationClosed("the generation is over"))
            return sent

        def post(source: Event) -> None:
            try:
                result = source.wait()
                payload = bytes_of(result if cut is None else cut(result))
            except BaseException as error:  # the event carries it
                sent.fail(error)
                return
            link.post(FRAME.pack(generation, *tag, len(payload)), payload, sent)

        source.when_done(post)
        return sent

    # --- receiving

    def receive(self, peer: int, tag: Tag, num_bytes: int) -> Event:
        """An event whose result is the payload (a writable memoryview); see `Wire.receive`."""
        mailbox = self._mailboxes.get(peer)
        if mailbox is None:
            event = Event()
            event.fail(GenerationClosed("the generation is over"))
            return event
        return mailbox.claim(tag, num_bytes)

    def _stranger(self) -> Incoming:
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            oldest.close()
            self.turned_away(oldest, AuthError("made room for a newer connection"))
        link = Incoming(self, timeout_s=self._timeout_s)
        self._strangers[link] = None
        return link

    def admit(self, identity: Identity) -> bytes:
        """The secret of the generation, for those who belong to it."""
        if (identity.job, identity.role) != (self._job, "executor"):
            raise AuthError("not an executor of this job")
        if identity.generation != self._generation or identity.rank not in self._addresses:
            raise AuthError(f"not a member of generation {self._generation}")
        return self._key

    def enter(self, link: Incoming, identity: Identity) -> _Mailbox:
        """The mailbox of a peer, which connects once."""
        mailbox = self._mailboxes[identity.rank]
        if mailbox.link is not None:
            raise AuthError(f"rank {identity.rank} is connected already")
        self._strangers.pop(link, None)
        mailbox.link = link
        return mailbox

    def turned_away(self, link: Incoming, error: BaseException) -> None:
        """Count who did not get in."""
        self._strangers.pop(link, None)
        self.num_refused += 1


def _not_accepted(peer: int, generation: int) -> PeerLost:
    return PeerLost(f"rank {peer} does not accept generation {generation}")
