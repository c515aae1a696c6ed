"""Messages over an asyncio stream, plain (inherited socket) or sealed (after a handshake)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from resihp.errors import AuthError, FrameError
from resihp.wire.auth import (
    Answer,
    Challenge,
    ClientHandshake,
    Identity,
    Proof,
    Seal,
    ServerHandshake,
)
from resihp.wire.framing import (
    CONTROL_LIMIT_BYTES,
    HEADER_BYTES,
    HELLO_LIMIT_BYTES,
    frame,
    frame_length,
)
from resihp.wire.messages import Message, decode, decode_as, encode

__all__ = [
    "MAX_UNSENT_BYTES",
    "Channel",
    "FrameChannel",
    "Reader",
    "Writer",
    "accept_handshake",
    "connect_handshake",
    "connection_lost",
    "read_frame",
]


MAX_UNSENT_BYTES = 4 * CONTROL_LIMIT_BYTES
"""What may wait for one peer; beyond it the peer is taken for stuck."""


class Reader(Protocol):
    """What a handshake reads from; a StreamReader is one."""

    async def readexactly(self, n: int) -> bytes:
        """The next `n` bytes; asyncio.IncompleteReadError at the end of the stream."""
        ...


class Writer(Protocol):
    """What a handshake writes to; a StreamWriter is one."""

    def write(self, data: bytes) -> None:
        """Send `data` soon."""
        ...


async def read_frame(reader: Reader, *, limit_bytes: int) -> bytes | None:
    """The next frame, None at the end of the stream (also when it ends inside a frame)."""
    try:
        header = await reader.readexactly(HEADER_BYTES)
        return await reader.readexactly(frame_length(header, limit_bytes=limit_bytes))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class FrameChannel:
    """One connection that carries frames. `send_payload` never blocks; one reader receives."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        seals: tuple[Seal, Seal] | None = None,
        *,
        limit_bytes: int = CONTROL_LIMIT_BYTES,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._outgoing, self._incoming = seals if seals is not None else (None, None)
        self._limit_bytes = limit_bytes

    def send_payload(self, payload: bytes) -> None:
        """Queue a frame; a closed connection drops it (the reader reports the loss).

        A peer that reads so slowly that too much waits for it loses its connection.
        """
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._writer.transport.abort()
            return
        if self._outgoing is not None:
            payload = self._outgoing.close(payload)
        self._writer.write(frame(payload, limit_bytes=self._limit_bytes))

    async def receive_payload(self) -> bytes | None:
        """The next payload, None when the peer is gone. FrameError, AuthError: do not trust it."""
        payload = await read_frame(self._reader, limit_bytes=self._limit_bytes)
        if payload is None or self._incoming is None:
            return payload
        return self._incoming.open(payload)

    async def drain(self, timeout_s: float) -> None:
        """Wait until the peer took what was sent, at most `timeout_s`."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()

    def close(self) -> None:
        """Close the connection; what was sent before still goes out."""
        self._writer.close()


class Channel(FrameChannel):
    """Messages between an executor, its supervisor, the node's monitor and an operator."""

    def send(self, message: Message) -> None:
        """Queue a message; a closed connection drops it (the reader reports the loss)."""
        self.send_payload(encode(message))

    async def receive(self) -> Message | None:
        """The next message, None when the peer is gone. FrameError, AuthError: do not trust it."""
        payload = await self.receive_payload()
        return None if payload is None else decode(payload)


async def _hello(reader: Reader) -> bytes:
    payload = await read_frame(reader, limit_bytes=HELLO_LIMIT_BYTES)
    if payload is None:
        raise AuthError("the peer left during the handshake")
    return payload


async def connect_handshake(
    reader: Reader,
    writer: Writer,
    secret: bytes,
    identity: Identity,
    *,
    timeout_s: float,
) -> tuple[Seal, Seal]:
    """Run the client side; (sending, receiving) seals. AuthError or TimeoutError otherwise."""
    async with asyncio.timeout(timeout_s):
        handshake = ClientHandshake(secret, identity)
        writer.write(frame(encode(handshake.challenge), limit_bytes=HELLO_LIMIT_BYTES))
        proof, sending, receiving = handshake.prove(decode_as(await _hello(reader), Answer))
        writer.write(frame(encode(proof), limit_bytes=HELLO_LIMIT_BYTES))
        return sending, receiving


async def accept_handshake(
    reader: Reader,
    writer: Writer,
    secret: bytes,
    admit: Callable[[Identity], str | None],
    *,
    timeout_s: float,
) -> tuple[Identity, Seal, Seal]:
    """Run the server side. `admit` returns why an identity is not welcome, None if it is."""
    async with asyncio.timeout(timeout_s):
        challenge = decode_as(await _hello(reader), Challenge)
        refusal = admit(challenge.identity)
        if refusal is not None:
            raise AuthError(refusal)
        handshake = ServerHandshake(secret, challenge)
        writer.write(frame(encode(handshake.answer), limit_bytes=HELLO_LIMIT_BYTES))
        sending, receiving = handshake.check(decode_as(await _hello(reader), Proof))
        return challenge.identity, sending, receiving


def connection_lost(error: BaseException) -> bool:
    """Whether `error` says that a peer must be dropped rather than that we have a bug."""
    return isinstance(error, FrameError | AuthError | ConnectionError | TimeoutError)
