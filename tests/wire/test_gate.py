"""A listening socket under attack: strangers of every kind come, and good peers do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from resihp.errors import AuthError
from resihp.wire import channel as channel_module
from resihp.wire.address import LOOPBACK, address_of, listen_at
from resihp.wire.auth import Challenge, Identity
from resihp.wire.channel import Channel, connect_handshake, connection_lost
from resihp.wire.framing import frame
from resihp.wire.gate import MAX_STRANGERS, Gate, is_worth_a_line, notice_silence
from resihp.wire.messages import Beat, Go, Message, Stop, encode

SECRET = b"s" * 32
FAR_S = 30.0
NEAR_S = 0.2
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Host:
    """A server that keeps what good peers say."""

    def __init__(self, timeout_s: float) -> None:
        self.gate = Gate(SECRET, lambda _: None, timeout_s=timeout_s)
        self.heard: list[tuple[int, Message]] = []
        self.channels: dict[int, Channel] = {}
        self.refusals: list[BaseException] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            identity, channel = await self.gate.enter(reader, writer)
            self.channels[identity.rank] = channel
            while (message := await channel.receive()) is not None:
                self.heard.append((identity.rank, message))
        except Exception as error:
            if not connection_lost(error):
                raise
            self.refusals.append(error)
        finally:
            writer.close()


@asynccontextmanager
async def hosting(timeout_s: float = FAR_S) -> AsyncIterator[Host]:
    host = Host(timeout_s)
    listener = listen_at(LOOPBACK)
    host.port = address_of(listener).port
    server = await asyncio.start_server(host.serve, sock=listener)
    try:
        async with asyncio.timeout(FAR_S):
            yield host
    finally:
        server.close()
        for channel in host.channels.values():
            channel.close()


async def dial(host: Host) -> Streams:
    return await asyncio.open_connection(LOOPBACK, host.port)


async def good_peer(host: Host, rank: int = 1, secret: bytes = SECRET) -> Channel:
    reader, writer = await dial(host)
    identity = Identity("job", "supervisor", rank, 0)
    try:
        seals = await connect_handshake(reader, writer, secret, identity, timeout_s=FAR_S)
    except AuthError:
        writer.close()
        raise
    return Channel(reader, writer, seals)


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(FAR_S):
        while not condition():
            await asyncio.sleep(0.001)


def beat(step: int) -> Beat:
    return Beat(step=step, instruction=0)


@pytest.mark.parametrize("sent", [b"", b"\x00", b"\x00\x00\x00\x40", b"\x00\x00\x00\x40half"])
@pytest.mark.asyncio
async def test_slow_strangers_do_not_touch_the_beats_of_good_peers(sent: bytes):
    """[S3] They connect, say nothing or half of it, and stay: a peer comes in, its beats too."""
    async with hosting() as host:
        before = await good_peer(host, 0)
        strangers = [await dial(host) for _ in range(3 * MAX_STRANGERS)]
        for _, writer in strangers:
            writer.write(sent)
        after = await good_peer(host, 1)
        for step in range(20):
            before.send(beat(step))
            after.send(beat(step))
        await until(lambda: len(host.heard) == 40)
        assert host.heard.count((1, beat(19))) == 1
        for _, writer in strangers:
            writer.close()
        before.close()
        after.close()


@pytest.mark.asyncio
async def test_only_so_many_strangers_at_a_time():
    """[S3] The oldest makes room; it does not hold a descriptor of ours any longer."""
    async with hosting() as host:
        strangers = [await dial(host) for _ in range(MAX_STRANGERS + 10)]
        await until(lambda: host.gate.num_refused == 10)
        for reader, _ in strangers[:10]:
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        for _, writer in strangers:
            writer.close()


@pytest.mark.asyncio
async def test_a_silent_stranger_has_little_time():
    """[S3] Then it is closed and counted."""
    async with hosting(NEAR_S) as host:
        reader, writer = await dial(host)
        writer.write(b"\x00\x00")
        assert await reader.read() == b""
        await until(lambda: host.gate.num_refused == 1)
        assert isinstance(host.refusals[0], TimeoutError)
        writer.close()


HOSTILE = {
    "a header of 4 GiB": struct.pack("!I", 0xFFFF_FFFF) + b"x" * 1000,
    "a frame above the hello": struct.pack("!I", 257) + b"x" * 1000,
    "deep nesting": frame(b"\x91" * 250 + b"\xc0"),
    "a map with a million keys": frame(b"\xdf\x00\x0f\x42\x40" + b"\xa1a\x01" * 60),
    "text of 4 GiB inside": frame(b"\x92\x94\xdb\xff\xff\xff\xffx"),
    "an array of 4 G items": frame(b"\xdd\xff\xff\xff\xff"),
    "JSON with NaN and two equal keys": frame(b'{"a": NaN, "a": 1e999}'),
    "numbers of no type": frame(msgspec.msgpack.encode([["job", "x", float("nan"), 1], b"n" * 16])),
    "a pickle": frame(b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94."),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("hello", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.asyncio
async def test_hostile_hellos_are_closed_and_cost_no_memory(hello: bytes):
    """[S2] Each is refused before memory is taken for what it announces; good peers stay."""
    async with hosting() as host:
        peer = await good_peer(host)

        async def attack(count: int) -> None:
            for _ in range(count):
                reader, writer = await dial(host)
                writer.write(hello)
                with contextlib.suppress(ConnectionResetError):  # closed with bytes unread
                    assert await reader.read() == b""
                writer.close()

        await attack(20)
        before_bytes = resident_bytes()
        await attack(100)
        assert resident_bytes() - before_bytes < 1 << 20
        assert host.gate.num_refused == 120
        peer.send(beat(1))
        await until(lambda: host.heard == [(1, beat(1))])
        peer.close()


@pytest.mark.asyncio
async def test_a_replayed_connection_is_refused_and_counted():
    """[S1] Every byte that a good peer sent, sent again: another nonce of ours, so it is nobody."""
    async with hosting() as host:
        recorded: list[bytes] = []
        reader, writer = await dial(host)

        class Recorder:
            def write(self, data: bytes) -> None:
                recorded.append(data)
                writer.write(data)

        identity = Identity("job", "supervisor", 1, 0)
        seals = await connect_handshake(reader, Recorder(), SECRET, identity, timeout_s=FAR_S)
        sealed = frame(seals[0].close(encode(beat(1))))
        writer.write(sealed)
        await until(lambda: host.heard == [(1, beat(1))])
        again, replayer = await dial(host)
        replayer.write(b"".join(recorded) + sealed)
        await again.read()
        await until(lambda: host.gate.num_refused == 1)
        assert "does not know this job's secret" in str(host.refusals[0])
        writer.write(sealed)  # a second time on its own connection
        await until(lambda: len(host.refusals) == 2)
        assert isinstance(host.refusals[1], AuthError)
        assert host.heard == [(1, beat(1))]
        replayer.close()
        writer.close()


@pytest.mark.asyncio
async def test_wrong_and_absent_secrets_change_nothing():
    """[S1] Closed, counted, and nothing that they sent is heard."""
    async with hosting() as host:
        for secret in (b"x" * 32, b""):
            with pytest.raises(AuthError):
                await good_peer(host, secret=secret)
        reader, writer = await dial(host)
        writer.write(frame(encode(beat(1))))  # no handshake at all
        await reader.read()
        await until(lambda: host.gate.num_refused == 3)
        assert host.heard == []
        assert host.channels == {}
        writer.close()


@pytest.mark.asyncio
async def test_a_reflected_challenge_gets_no_answer_that_helps():
    """[S1] Two connections, each fed what the other one got: both end."""
    async with hosting() as host:
        (first_reader, first), (second_reader, second) = await dial(host), await dial(host)
        hello = frame(encode(Challenge(Identity("job", "supervisor", 1, 0), b"n" * 16)))
        first.write(hello)
        second.write(hello)
        first_answer = await _frame(first_reader)
        second_answer = await _frame(second_reader)
        first.write(second_answer)
        second.write(first_answer)
        assert await first_reader.read() == b""
        assert await second_reader.read() == b""
        await until(lambda: host.gate.num_refused == 2)
        assert host.channels == {}
        first.close()
        second.close()


async def _frame(reader: asyncio.StreamReader) -> bytes:
    header = await reader.readexactly(4)
    return header + await reader.readexactly(int.from_bytes(header, "big"))


@pytest.mark.asyncio
async def test_a_peer_that_does_not_read_loses_its_connection(monkeypatch: pytest.MonkeyPatch):
    """[S3] What waits for it is bounded; others get their messages meanwhile."""
    monkeypatch.setattr(channel_module, "MAX_UNSENT_BYTES", 1 << 16)
    async with hosting() as host:
        slow, good = await good_peer(host, 1), await good_peer(host, 2)
        slow._reader._transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: len(host.channels) == 2)
        sent = 0
        while 1 in host.channels and not host.channels[1]._writer.is_closing():
            for _ in range(100):
                host.channels[1].send(Stop(reason="x" * 4000, exit_code=0))
                sent += 1
            host.channels[2].send(Go(generation=sent))
            assert await good.receive() == Go(generation=sent)
        assert host.channels[1]._writer.transport.get_write_buffer_size() == 0
        slow.close()
        good.close()


def test_a_flood_fills_no_log():
    """The first few of a kind are told, then ever fewer."""
    told = [count for count in range(1, 100_001) if is_worth_a_line(count)]
    assert told[:17] == [*range(1, 17), 32]
    assert len(told) < 32


def test_the_kernel_ends_connections_of_machines_that_went_away():
    """The timeout of unacknowledged data is set on TCP, and nothing is done to other sockets."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("Linux only")
    with listen_at(LOOPBACK) as listener, socket.create_connection(listener.getsockname()) as sock:
        notice_silence(sock, 5.0)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        notice_silence(ours, 5.0)
