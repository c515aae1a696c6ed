"""The two ends of one directed connection between executors.

A connection carries frames one way, sender to receiver, after a handshake that needs both. The
receiving end reads every byte straight to where it stays: never more than the piece that it
expects, so nothing is copied. The sending end writes from whichever thread posts, as much as the
kernel takes at once; the event loop writes the rest. Within a node a connection is a Unix socket,
which costs less than half of TCP for a megabyte.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple, Protocol, cast

import numpy as np

from resihp.errors import AuthError, FrameError, GenerationClosed, PeerLost
from resihp.executor.stream import Event
from resihp.wire.address import Address
from resihp.wire.auth import Challenge, Identity, Proof, ServerHandshake
from resihp.wire.channel import connect_handshake
from resihp.wire.framing import HEADER_BYTES, HELLO_LIMIT_BYTES, frame, frame_length
from resihp.wire.messages import decode_as, encode

__all__ = ["FRAME", "Door", "Inbox", "Incoming", "Outgoing", "listen_locally", "open_link"]

FRAME = struct.Struct("!IBIHHIHQ")
"""Header of a payload: generation, the fields of its tag, bytes."""
SEND_BUFFER_BYTES = 4 << 20
"""What the kernel is asked to hold of one connection; it may grant less."""
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group of a Unix socket's other end (`struct ucred`)."""
_MOST_PIECES = 64
"""Pieces of memory in one write; the kernel allows 1,024."""


class Inbox(Protocol):
    """Where the frames of one authenticated peer go. Called on the event loop's thread."""

    def allow(self, header: tuple[int, ...]) -> None:
        """AuthError where the peer may not send this; called before memory is taken for it."""
        ...

    def deliver(self, header: tuple[int, ...], payload: memoryview) -> None:
        """Take a whole frame; AuthError where there was no place for it."""
        ...

    def fail(self, cause: BaseException) -> None:
        """The connection is gone: nothing more comes."""
        ...


class Door(Protocol):
    """Who is let in. Called on the event loop's thread."""

    def admit(self, identity: Identity) -> bytes:
        """The secret that `identity` has to know; AuthError where it is not welcome."""
        ...

    def enter(self, link: Incoming, identity: Identity) -> Inbox:
        """The inbox of a peer that proved itself; AuthError where it has come already."""
        ...

    def turned_away(self, link: Incoming, error: BaseException) -> None:
        """Somebody left, or had to leave, before it entered."""
        ...


class Incoming(asyncio.BufferedProtocol):
    """The receiving end: the server's side of the handshake, then frames, until it is closed."""

    def __init__(self, door: Door, *, timeout_s: float) -> None:
        self._door = door
        self._inbox: Inbox | None = None
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._header = memoryview(bytearray(FRAME.size))
        self._expect_hello(self._challenged)

    def close(self) -> None:
        """Close the connection without telling anybody here."""
        self._closed = True
        # uvloop may still read once, and takes a buffer without room for an error.
        self._piece, self._filled = self._header, 0
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # --- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A stranger: it has a limited time to prove itself."""
        self._transport = cast("asyncio.Transport", transport)
        if self._closed:  # before the loop had told us
            self._transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(
            self._timeout_s, lambda: self._end(TimeoutError("no handshake in time"))
        )

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: the rest of the piece that is expected."""
        return self._piece[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Go on when the piece is whole."""
        if self._closed:
            return
        self._filled += nbytes
        if self._filled < len(self._piece):
            return
        try:
            self._then(self._piece)
        except (AuthError, FrameError) as error:
            self._end(error)

    def eof_received(self) -> bool:
        """The peer writes no more."""
        self._end(ConnectionResetError("the peer closed the connection"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._end(exc or ConnectionResetError("the connection is closed"))

    def _end(self, cause: BaseException) -> None:
        if self._closed:
            return
        self.close()
        if self._inbox is not None:
            self._inbox.fail(cause)
        else:
            self._door.turned_away(self, cause)

    # --- pieces

    def _expect(self, piece: memoryview, then: Callable[[memoryview], None]) -> None:
        """Read exactly `piece`, which is not empty, and call `then` with it."""
        self._piece, self._filled, self._then = piece, 0, then

    def _expect_hello(self, then: Callable[[bytes], None]) -> None:
        """Read one frame of the handshake."""

        def measured(header: memoryview) -> None:
            length = frame_length(bytes(header), limit_bytes=HELLO_LIMIT_BYTES)
            if length == 0:
                raise FrameError("an empty frame in the handshake")
            self._expect(memoryview(bytearray(length)), lambda piece: then(bytes(piece)))

        self._expect(memoryview(bytearray(HEADER_BYTES)), measured)

    def _challenged(self, payload: bytes) -> None:
        challenge = decode_as(payload, Challenge)
        handshake = ServerHandshake(self._door.admit(challenge.identity), challenge)

        def proved(payload: bytes) -> None:
            handshake.check(decode_as(payload, Proof))
            self._inbox = self._door.enter(self, challenge.identity)
            assert self._timer is not None
            self._timer.cancel()
            self._expect(self._header, self._announced)

        assert self._transport is not None
        self._transport.write(frame(encode(handshake.answer), limit_bytes=HELLO_LIMIT_BYTES))
        self._expect_hello(proved)

    def _announced(self, piece: memoryview) -> None:
        header = FRAME.unpack(piece)
        inbox = self._inbox
        assert inbox is not None
        inbox.allow(header)
        num_bytes: int = header[-1]

        def whole(payload: memoryview) -> None:
            self._expect(self._header, self._announced)
            inbox.deliver(header, payload)

        if num_bytes == 0:
            whole(memoryview(b""))
        else:
            self._expect(_space(num_bytes), whole)


def _space(num_bytes: int) -> memoryview:
    """Memory that nobody has written to yet."""
    return memoryview(cast("bytearray", np.empty(num_bytes, np.uint8)))


class _Piece(NamedTuple):
    """Memory to write, and what happens when it is written (None: nothing)."""

    data: memoryview
    sent: Event | None


class Outgoing:
    """The sending end, over a connected non-blocking socket that it owns."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: deque[_Piece] = deque()
        self._error: BaseException | None = None
        self._watched = False

    def post(self, header: bytes, payload: memoryview, sent: Event) -> None:
        """Send a frame, from any thread; returns at once.

        A part that the kernel does not take now is sent later from where it lies. `sent` happens
        when all of it is written, or fails where it cannot be.
        """
        with self._lock:
            behind = bool(self._waiting)
            if len(payload):
                self._waiting.append(_Piece(memoryview(header), None))
                self._waiting.append(_Piece(payload, sent))
            else:
                self._waiting.append(_Piece(memoryview(header), sent))
            done = [] if behind else self._write()
            watch = not behind and bool(self._waiting)
        self._tell(done)
        if watch:
            self._loop.call_soon_threadsafe(self._watch)

    def _write(self) -> list[Event]:
        """Write what the kernel takes; what happens now. The lock is held."""
        waiting = self._waiting
        if self._error is not None:
            return self._drop()
        done: list[Event] = []
        try:
            while waiting:
                batch = [piece.data for piece in islice(waiting, _MOST_PIECES)]
                num_sent = self._socket.sendmsg(batch)
                while waiting and num_sent >= len(waiting[0].data):
                    piece = waiting.popleft()
                    num_sent -= len(piece.data)
                    if piece.sent is not None:
                        done.append(piece.sent)
                if num_sent:
                    waiting[0] = waiting[0]._replace(data=waiting[0].data[num_sent:])
        except BlockingIOError:
            pass
        except OSError as error:
            self._error = PeerLost("the connection broke")
            self._error.__cause__ = error
            done += self._drop()
        return done

    def _drop(self) -> list[Event]:
        dropped = [piece.sent for piece in self._waiting if piece.sent is not None]
        self._waiting.clear()
        return dropped

    def _tell(self, events: list[Event]) -> None:
        """What happened with frames, not under the lock: somebody may post in reply."""
        for event in events:
            if self._error is None:
                event.set()
            else:
                event.fail(self._error)

    def _watch(self) -> None:
        """Write on when the kernel takes more."""
        with self._lock:
            if self._waiting and not self._watched:
                self._watched = True
                self._loop.add_writer(self._socket.fileno(), self._writable)

    def _writable(self) -> None:
        with self._lock:
            done = self._write()
            if not self._waiting:
                self._unwatch()
        self._tell(done)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_writer(self._socket.fileno())

    def close(self) -> None:
        """Close the connection: what is not sent fails. On the event loop's thread."""
        with self._lock:
            self._error = GenerationClosed("the generation is over")
            dropped = self._drop()
            self._unwatch()
            self._socket.close()
        self._tell(dropped)


# --- opening


def _local_name(address: Address) -> str:
    """Name of the Unix socket beside a TCP port, which only one process has on this host.

    It is an abstract one: no file, so nothing to leave behind or to protect.
    """
    return f"\0resihp-executor-{address}"


def listen_locally(address: Address) -> socket.socket | None:
    """A Unix socket bound for the process that has `address`, None where there are none.

    Somebody else may have taken the name; then peers find no process of ours there and use TCP.
    """
    if sys.platform != "linux":
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_local_name(address))
    except OSError:
        sock.close()
        return None
    return sock


def _connect_locally(address: Address) -> socket.socket | None:
    """A connection to the process of this host that has `address`, None where it cannot be had."""
    if sys.platform != "linux":
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(_local_name(address))  # a Unix socket connects, or not, at once
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user == os.getuid():
            return sock
    except OSError:
        pass
    sock.close()
    return None


async def _connect(address: Address, *, same_node: bool) -> socket.socket:
    sock = _connect_locally(address) if same_node else None
    if sock is None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(sock, (address.host, address.port))
        except BaseException:
            sock.close()
            raise
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return sock


class _Stream:
    """Reads and writes of the handshake on a bare socket, which leave nothing in a buffer."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def readexactly(self, n: int) -> bytes:
        """The next `n` bytes; IncompleteReadError where there are fewer."""
        data = b""
        while len(data) < n:
            part = await asyncio.get_running_loop().sock_recv(self._socket, n - len(data))
            if not part:
                raise asyncio.IncompleteReadError(data, n)
            data += part
        return data

    def write(self, data: bytes) -> None:
        """Write a frame of the handshake: an empty send buffer takes it whole."""
        if self._socket.send(data) != len(data):
            raise ConnectionError("no room for a frame of the handshake")


async def open_link(
    address: Address, key: bytes, identity: Identity, *, timeout_s: float, same_node: bool = False
) -> Outgoing:
    """Connect as `identity` to the executor that listens at `address`, on this node or another.

    AuthError where it turns us away, OSError or TimeoutError where it is not there.
    """
    sock = await _connect(address, same_node=same_node)
    try:
        stream = _Stream(sock)
        await connect_handshake(stream, stream, key, identity, timeout_s=timeout_s)
    except BaseException:
        sock.close()
        raise
    return Outgoing(sock)
