"""Channels over real sockets: handshakes that succeed, and peers that must not get in."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from resihp.errors import AuthError, FrameError
from resihp.wire.auth import Challenge, Identity
from resihp.wire.channel import (
    Channel,
    accept_handshake,
    connect_handshake,
    connection_lost,
    read_frame,
)
from resihp.wire.framing import HELLO_LIMIT_BYTES, frame
from resihp.wire.messages import Beat, Go, Stop, encode

SECRET = b"s" * 32
IDENTITY = Identity("job", "supervisor", 2, 0)
SHORT_S = 0.05
LONG_S = 20.0

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def welcome(_: Identity) -> str | None:
    """Admits everybody."""
    return None


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Streams, Streams]]:
    """Both ends of a socket pair."""
    ours, theirs = socket.socketpair()
    client = await asyncio.open_connection(sock=ours)
    server = await asyncio.open_connection(sock=theirs)
    try:
        yield client, server
    finally:
        for _, writer in (client, server):
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def accept(
    server: Streams,
    secret: bytes = SECRET,
    admit: Callable[[Identity], str | None] = welcome,
    timeout_s: float = LONG_S,
) -> tuple[Identity, Channel]:
    """The server's side of a handshake."""
    identity, sending, receiving = await accept_handshake(
        *server, secret, admit, timeout_s=timeout_s
    )
    return identity, Channel(*server, (sending, receiving))


async def connect(client: Streams, secret: bytes = SECRET) -> Channel:
    """The client's side."""
    seals = await connect_handshake(*client, secret, IDENTITY, timeout_s=LONG_S)
    return Channel(*client, seals)


async def failure_of(accepting: asyncio.Task[tuple[Identity, Channel]]) -> BaseException:
    """The error that a handshake ended with, which is one that only this peer pays for."""
    (error,) = await asyncio.gather(accepting, return_exceptions=True)
    assert isinstance(error, BaseException), "this peer should not have got in"
    assert connection_lost(error)
    return error


@pytest.mark.asyncio
async def test_messages_cross_a_sealed_channel_in_order():
    """Both directions, small and large."""
    async with connected() as (client, server):
        (identity, theirs), ours = await asyncio.gather(accept(server), connect(client))
        assert identity == IDENTITY
        sent = [Beat(step=n, instruction=0) for n in range(50)]
        for message in sent:
            ours.send(message)
        theirs.send(Stop(reason="x" * 1_000_000, exit_code=0))
        assert [await theirs.receive() for _ in sent] == sent
        assert await ours.receive() == Stop(reason="x" * 1_000_000, exit_code=0)


@pytest.mark.asyncio
async def test_a_plain_channel_needs_no_handshake():
    """The socket between supervisor and executor is inherited, so nobody else has it."""
    async with connected() as (client, server):
        Channel(*client).send(Go(generation=3))
        assert await Channel(*server).receive() == Go(generation=3)


@pytest.mark.asyncio
async def test_the_end_of_the_peer_is_none_after_what_it_sent():
    """Messages before the end arrive; a message to the closed channel is dropped."""
    async with connected() as (client, server):
        ours, theirs = Channel(*client), Channel(*server)
        ours.send(Go(generation=1))
        ours.close()
        ours.send(Go(generation=2))
        assert await theirs.receive() == Go(generation=1)
        assert await theirs.receive() is None


@pytest.mark.asyncio
async def test_a_frame_cut_by_the_end_of_the_peer_is_its_end():
    """What a killed process leaves of its last message is no message."""
    async with connected() as (client, server):
        client[1].write(frame(encode(Go(generation=1)))[:-1])
        client[1].close()
        assert await Channel(*server).receive() is None


@pytest.mark.asyncio
async def test_unsealed_bytes_on_a_sealed_channel_are_refused():
    """An inserted frame has no code."""
    async with connected() as (client, server):
        (_, theirs), _ = await asyncio.gather(accept(server), connect(client))
        client[1].write(frame(encode(Stop(reason="forged", exit_code=0))))
        with pytest.raises(AuthError):
            await theirs.receive()


@pytest.mark.asyncio
async def test_a_message_of_no_kind_is_refused():
    """Authentic bytes that are no message."""
    async with connected() as (client, server):
        client[1].write(frame(b"\xc1 not msgpack"))
        with pytest.raises(FrameError):
            await Channel(*server).receive()


@pytest.mark.asyncio
@pytest.mark.parametrize("secrets", [(SECRET, b"t" * 32), (b"t" * 32, SECRET)])
async def test_different_secrets_do_not_meet(secrets: tuple[bytes, bytes]):
    """Neither side gets a channel, whichever of them has the wrong secret."""
    async with connected() as (client, server):
        accepting = asyncio.create_task(accept(server, secrets[0]))
        with pytest.raises(AuthError):
            await connect(client, secrets[1])
        client[1].close()
        assert isinstance(await failure_of(accepting), AuthError)


@pytest.mark.asyncio
async def test_an_unwelcome_identity_is_refused_before_anything_is_said():
    """The server does not even prove itself to it."""
    async with connected() as (client, server):
        accepting = asyncio.create_task(accept(server, admit=lambda who: f"no {who.role}s"))
        connecting = asyncio.create_task(connect(client))
        error = await failure_of(accepting)
        assert isinstance(error, AuthError)
        assert str(error) == "no supervisors"
        server[1].close()
        with pytest.raises(AuthError, match="left during the handshake"):
            await connecting


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "hello",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff" * 64,
        frame(b"\x00" * 20),
        frame(b""),
        frame(b"x" * (HELLO_LIMIT_BYTES + 1)),
        frame(encode(Go(generation=1))),
    ],
    ids=["http", "4 GiB", "zeros", "empty", "too long", "a message"],
)
async def test_a_stranger_that_sends_something_else_is_refused_at_once(hello: bytes):
    """Long before the time-out, and no more than the hello's limit is ever read."""
    async with connected() as (client, server):
        client[1].write(hello)
        assert isinstance(await failure_of(asyncio.create_task(accept(server))), FrameError)


@pytest.mark.asyncio
async def test_a_silent_stranger_is_dropped_in_time():
    """[S3] It may hold its connection for the given time only."""
    async with connected() as (_, server):
        error = await failure_of(asyncio.create_task(accept(server, timeout_s=SHORT_S)))
        assert isinstance(error, TimeoutError)


@pytest.mark.asyncio
async def test_a_stranger_that_stops_half_way_is_dropped_in_time():
    """[S3] The time counts for the whole handshake, not for each frame."""
    async with connected() as (client, server):
        accepting = asyncio.create_task(accept(server, timeout_s=SHORT_S))
        client[1].write(frame(encode(Challenge(IDENTITY, b"n" * 16))))
        assert await read_frame(client[0], limit_bytes=HELLO_LIMIT_BYTES) is not None
        assert isinstance(await failure_of(accepting), TimeoutError)


@pytest.mark.asyncio
async def test_a_stranger_that_leaves_is_forgotten():
    """Before and in the middle of its hello."""
    for hello in (b"", b"\x00\x00\x00"):
        async with connected() as (client, server):
            client[1].write(hello)
            client[1].close()
            error = await failure_of(asyncio.create_task(accept(server)))
            assert isinstance(error, AuthError)


@pytest.mark.asyncio
async def test_a_client_does_not_wait_for_a_silent_server():
    """A port that somebody else listens on by now."""
    async with connected() as (client, _):
        with pytest.raises(TimeoutError):
            await connect_handshake(*client, SECRET, IDENTITY, timeout_s=SHORT_S)


@pytest.mark.asyncio
async def test_a_message_above_the_limit_is_refused_by_its_sender():
    """The receiver would drop the connection, so it must not leave."""
    async with connected() as (client, _):
        with pytest.raises(FrameError, match="above the limit"):
            Channel(*client).send(Stop(reason="x" * (8 << 20), exit_code=0))


@pytest.mark.asyncio
async def test_drain_gives_up_on_a_peer_that_does_not_read():
    """A stuck peer cannot hold us up."""
    async with connected() as (client, _):
        ours = Channel(*client)
        for _ in range(4):
            ours.send(Stop(reason="x" * (4 << 20), exit_code=0))
        async with asyncio.timeout(LONG_S):
            await ours.drain(SHORT_S)
        client[1].transport.abort()


def test_a_bug_of_ours_is_not_taken_for_a_lost_connection():
    """Such errors keep their traceback."""
    assert not connection_lost(AssertionError())
    assert not connection_lost(KeyError())
    assert all(map(connection_lost, (FrameError(), AuthError(), TimeoutError(), BrokenPipeError())))
