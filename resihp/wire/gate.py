"""The way in at a listening socket: few strangers at a time, each with little time and room.

Whoever reaches the socket may connect, say nothing, say something else, or come a thousand times.
None of this costs a good peer more than its own handshake: the oldest stranger makes room for the
newest, and a good peer is a stranger for a moment only.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from resihp.errors import AuthError
from resihp.wire.auth import Identity, Seal
from resihp.wire.channel import Channel, accept_handshake

__all__ = ["MAX_STRANGERS", "Gate", "is_worth_a_line", "notice_silence"]

MAX_STRANGERS = 64
"""Connections at one socket that have not proved themselves yet."""


class Gate:
    """Turns connections into channels of peers that know `secret`.

    `admit` returns why an identity is not welcome, None if it is. A stranger has `timeout_s`.
    """

    def __init__(
        self, secret: bytes, admit: Callable[[Identity], str | None], *, timeout_s: float
    ) -> None:
        self._secret = secret
        self._admit = admit
        self._timeout_s = timeout_s
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self.num_refused = 0
        """Connections that were turned away, for whatever reason."""

    async def enter(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Identity, Channel]:
        """The peer, once it proved itself, and its messages; see `prove`."""
        identity, seals = await self.prove(reader, writer)
        return identity, Channel(reader, writer, seals)

    async def prove(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Identity, tuple[Seal, Seal]]:
        """The peer, once it proved itself; the caller closes `writer` in any case.

        FrameError, AuthError, TimeoutError or ConnectionError where it does not get in.
        """
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            identity, *seals = await accept_handshake(
                reader, writer, self._secret, self._admit, timeout_s=self._timeout_s
            )
            if writer not in self._strangers:
                raise AuthError("made room for a newer connection")
        except BaseException:
            self.num_refused += 1
            raise
        finally:
            self._strangers.pop(writer, None)
        notice_silence(writer.get_extra_info("socket"), self._timeout_s)
        return identity, (seals[0], seals[1])


def is_worth_a_line(count: int) -> bool:
    """Whether the `count`-th event of a kind is logged: a flood must not fill the disk."""
    return count <= 16 or count & (count - 1) == 0


def notice_silence(sock: socket.socket, within_s: float) -> None:
    """Have the kernel end a TCP connection whose other end acknowledges nothing for so long.

    Without it a machine that went away without a word keeps its connections open for minutes.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        every_s = max(1, round(within_s / 3))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(within_s * 1000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
