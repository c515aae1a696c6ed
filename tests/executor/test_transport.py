"""The transport between executors, in one process but over real sockets, on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager

import pytest
import torch
import uvloop
from torch import Tensor

from resihp.errors import AuthError, FrameError, GenerationClosed, PeerLost
from resihp.executor import transport as module
from resihp.executor.device.interface import STATE, Tag
from resihp.executor.link import Incoming
from resihp.executor.stream import Event
from resihp.executor.transport import Transport
from resihp.wire.address import LOOPBACK, Address, address_of
from resihp.wire.auth import Identity
from resihp.wire.channel import connect_handshake

KEY = b"k" * 32
FAR_S = 20.0
NEAR_S = 0.2
NOWHERE = Address(LOOPBACK, 0)
"""Of a rank that nobody connects to."""


def on_both_loops(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    """Runs a coroutine as a test on asyncio's own event loop and on uvloop's."""
    factories = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

    @pytest.mark.parametrize("loop", factories)
    def run(loop: str, **arguments: object) -> None:
        with asyncio.Runner(loop_factory=factories[loop]) as runner:
            runner.run(test(**arguments))

    given = inspect.signature(test).parameters.values()
    mine = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = inspect.Signature([*given, mine])  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An exception in a server task only shows in the log."""
    yield
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


def tag(number: int = 0, *, chunk: int = 0, step: int = 0) -> Tag:
    return Tag(kind=5, step=step, stage=0, home=0, microbatch=number, chunk=chunk)


def made(tensor: Tensor) -> Event:
    """An event that brought `tensor` already."""
    event = Event()
    event.set(tensor)
    return event


def floats(event_result: memoryview) -> list[float]:
    return torch.frombuffer(event_result, dtype=torch.float32).tolist()


@asynccontextmanager
async def transports(count: int, *, begin: bool = True) -> AsyncIterator[list[Transport]]:
    """Ranks 0 .. count - 1, each in generation 1 and connected to all others."""
    ranks = [Transport("job", rank, timeout_s=FAR_S) for rank in range(count)]
    addresses = {rank: await transport.open() for rank, transport in enumerate(ranks)}
    try:
        if begin:
            await begin_all(ranks, addresses, 1)
        yield ranks
    finally:
        for transport in ranks:
            await transport.close()
        await asyncio.sleep(0)  # let the aborted connections go


def addresses_of(ranks: list[Transport]) -> dict[int, Address]:
    return {rank: Address(*place_of(transport)) for rank, transport in enumerate(ranks)}


def place_of(transport: Transport) -> tuple[str, int]:
    host, port = transport._servers[0].sockets[0].getsockname()[:2]
    return host, port


async def begin_all(
    ranks: list[Transport], addresses: dict[int, Address], generation: int, key: bytes = KEY
) -> None:
    for transport in ranks:
        transport.begin(generation, key, addresses)
    for rank, transport in enumerate(ranks):
        await transport.connect(set(addresses) - {rank})


async def outcome(event: Event) -> object:
    """What an event brings, in time: its result or its error."""
    async with asyncio.timeout(FAR_S):
        (result,) = await asyncio.gather(event.wait_async(), return_exceptions=True)
    return result


async def error_of(event: Event) -> BaseException:
    error = await outcome(event)
    assert isinstance(error, BaseException)
    return error


# --- payloads


@pytest.mark.parametrize("shape", [(3, 2), (0,), (), (1 << 20,)], ids=str)
@on_both_loops
async def test_a_tensor_arrives_with_its_bits(shape: tuple[int, ...]):
    """Any size, from nothing to more than all buffers hold."""
    async with transports(2) as (a, b):
        sent = torch.randn(shape)
        a.send(1, tag(), made(sent))
        payload = await outcome(b.receive(0, tag(), 4 * sent.numel()))
        assert payload == sent.numpy().tobytes()


@on_both_loops
async def test_messages_are_found_by_tag_not_by_order():
    """A late receive never blocks another message; every part of the tag counts."""
    async with transports(2) as (a, b):
        tags = [
            tag(0),
            tag(1),
            tag(0, chunk=1),
            tag(0, step=1),
            Tag(6, 0, 0, 0, 0, 0),
            Tag(5, 0, 1, 0, 0, 0),
            Tag(5, 0, 0, 1, 0, 0),
            Tag(STATE, 1 << 20, 0, 0, 0, 0),
        ]
        for number, each in enumerate(tags):
            a.send(1, each, made(torch.tensor([float(number)])))
        for number, each in reversed(list(enumerate(tags))):
            payload = await outcome(b.receive(0, each, 4))
            assert isinstance(payload, memoryview)
            assert floats(payload) == [number]


@on_both_loops
async def test_a_message_may_come_before_or_after_its_receive():
    """Both meet under the tag."""
    async with transports(2) as (a, b):
        early = b.receive(0, tag(1), 4)
        a.send(1, tag(2), made(torch.tensor([2.0])))
        a.send(1, tag(1), made(torch.tensor([1.0])))
        assert await outcome(early) == torch.tensor([1.0]).numpy().tobytes()
        late = b.receive(0, tag(2), 4)  # sent before tag 1, so it is here
        assert late.done
        assert late.wait() == torch.tensor([2.0]).numpy().tobytes()


@on_both_loops
async def test_a_tag_names_a_message_of_one_peer():
    """The same tag from another peer is another message."""
    async with transports(3) as (a, b, c):
        from_a, from_b = c.receive(0, tag(), 4), c.receive(1, tag(), 4)
        b.send(2, tag(), made(torch.tensor([1.0])))
        a.send(2, tag(), made(torch.tensor([0.0])))
        for number, event in enumerate((from_a, from_b)):
            payload = await outcome(event)
            assert isinstance(payload, memoryview)
            assert floats(payload) == [number]


@on_both_loops
async def test_any_thread_may_receive():
    """Streams ask for their inputs themselves."""
    async with transports(2) as (a, b):
        results: list[object] = []
        thread = threading.Thread(target=lambda: results.append(b.receive(0, tag(), 4).wait()))
        thread.start()
        a.send(1, tag(), made(torch.ones(1)))
        await asyncio.to_thread(thread.join, FAR_S)
        assert results == [torch.ones(1).numpy().tobytes()]


@on_both_loops
async def test_many_messages_cross_both_ways_at_once():
    """More than the buffers hold, with nobody receiving yet: a send never blocks."""
    async with transports(2) as ranks:
        size = 1 << 16
        sent: dict[tuple[int, int], Tensor] = {}
        for n in range(40):
            for me in (0, 1):
                sent[me, n] = torch.full((size,), float(n + 100 * me))
                ranks[me].send(1 - me, tag(n), made(sent[me, n]))
        for (me, n), tensor in reversed(sent.items()):
            assert (
                await outcome(ranks[1 - me].receive(me, tag(n), 4 * size))
                == tensor.numpy().tobytes()
            )


@on_both_loops
async def test_any_thread_may_send():
    """Streams post what they made themselves, also more than the kernel takes at once."""
    async with transports(2) as (a, b):
        tensors = [torch.randn(1 << 20) for _ in range(8)]

        def post() -> None:
            for number, tensor in enumerate(tensors):
                a.send(1, tag(number), made(tensor))

        thread = threading.Thread(target=post)
        thread.start()
        await asyncio.to_thread(thread.join, FAR_S)
        for number, tensor in enumerate(tensors):
            assert await outcome(b.receive(0, tag(number), 4 << 20)) == tensor.numpy().tobytes()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are of Linux")
@pytest.mark.parametrize("taken", [False, True], ids=["name free", "name taken"])
@on_both_loops
async def test_peers_of_one_host_use_a_unix_socket_where_they_can(taken: bool):
    """Where somebody else sits on the name they find each other over TCP."""
    a, b = (Transport("job", rank, timeout_s=FAR_S) for rank in (0, 1))
    with socket.socket(socket.AF_UNIX) as squatter:
        addresses = {0: await a.open(), 1: await b.open()}
        if taken:
            local = b._servers.pop()
            name = local.sockets[0].getsockname()
            local.close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            squatter.bind(name)  # and does not even listen
        await begin_all([a, b], addresses, 1)
        family = a._links[1]._socket.family
        assert family == (socket.AF_INET if taken else socket.AF_UNIX)
        a.send(1, tag(), made(torch.ones(2)))
        assert await outcome(b.receive(0, tag(), 8)) == torch.ones(2).numpy().tobytes()
        await a.close()
        await b.close()


# --- ends


@on_both_loops
async def test_a_lost_peer_fails_what_is_pending_from_it_and_nothing_else():
    """At once, and also what is asked for later; what arrived before is still there."""
    async with transports(3) as (a, b, c):
        a.send(2, tag(1), made(torch.ones(1)))
        first, pending, other = (
            c.receive(0, tag(1), 4),
            c.receive(0, tag(2), 4),
            c.receive(1, tag(2), 4),
        )
        a.send(2, tag(3), made(torch.ones(1)))
        await outcome(first)
        await outcome(c.receive(0, tag(3), 4))
        a.send(2, tag(4), made(torch.ones(1)))
        await a.close()
        assert isinstance(await error_of(pending), PeerLost)
        later = c.receive(0, tag(5), 4)
        assert later.done
        assert isinstance(later.error, PeerLost)
        assert not other.done
        b.send(2, tag(2), made(torch.ones(1)))
        assert await outcome(other) == torch.ones(1).numpy().tobytes()


@on_both_loops
async def test_a_message_cut_by_the_death_of_its_sender_is_lost():
    """Half a tensor is never delivered."""
    async with transports(1, begin=False) as (a,):
        a.begin(1, KEY, {0: NOWHERE, 1: NOWHERE})
        pending = a.receive(1, tag(), 4)
        async with impostor(a, rank=1) as writer:
            writer.write(header(1, tag(), 8) + b"half")
        assert isinstance(await error_of(pending), PeerLost)


@on_both_loops
async def test_the_end_of_a_generation_fails_all_that_is_pending():
    """Not as a lost peer: nobody is to blame."""
    async with transports(2) as (_, b):
        pending = [b.receive(0, tag(n), 4) for n in range(5)]
        b.end()
        assert all(event.done for event in pending)
        pending.append(b.receive(0, tag(9), 4))
        assert all(isinstance(event.error, GenerationClosed) for event in pending)


@on_both_loops
async def test_a_send_after_the_end_is_dropped():
    """Streams may still be at work when the generation ends."""
    async with transports(2) as (a, b):
        a.end()
        a.send(1, tag(), made(torch.ones(1)))
        assert isinstance(await error_of(b.receive(0, tag(), 4)), PeerLost)


@on_both_loops
async def test_generations_share_nothing():
    """What the old one left unread is not found in the new one, under the same tags."""
    async with transports(2) as ranks:
        a, b = ranks
        a.send(1, tag(1), made(torch.tensor([1.0])))
        a.send(1, tag(2), made(torch.tensor([1.0])))
        await outcome(b.receive(0, tag(2), 4))  # so tag 1 is here, unread
        await begin_all(ranks, addresses_of(ranks), 2)
        event = b.receive(0, tag(1), 4)
        assert not event.done
        a.send(1, tag(1), made(torch.tensor([2.0])))
        assert await outcome(event) == torch.tensor([2.0]).numpy().tobytes()


@on_both_loops
async def test_generations_follow_each_other_while_messages_fly():
    """Many times in a row, with sends on their way at each end."""
    async with transports(3) as ranks:
        addresses = addresses_of(ranks)
        for generation in range(2, 12):
            await begin_all(ranks, addresses, generation)
            for n in range(8):
                ranks[0].send(1, tag(n), made(torch.full((1 << 14,), float(generation))))
            payload = await outcome(ranks[1].receive(0, tag(0), 4 << 14))
            assert isinstance(payload, memoryview)
            assert floats(payload)[0] == generation


# --- connecting


@on_both_loops
async def test_a_peer_that_begins_later_is_waited_for():
    """A standby rank gives its shards away without meeting the others before."""
    async with transports(2, begin=False) as ranks:
        a, b = ranks
        addresses = addresses_of(ranks)
        a.begin(1, KEY, addresses)
        connecting = asyncio.create_task(a.connect({1}))
        while not b.num_refused:
            await asyncio.sleep(0)
        assert not connecting.done()
        b.begin(1, KEY, addresses)
        async with asyncio.timeout(FAR_S):
            await connecting
        a.send(1, tag(), made(torch.ones(1)))
        assert await outcome(b.receive(0, tag(), 4)) == torch.ones(1).numpy().tobytes()


@on_both_loops
async def test_connecting_twice_is_connecting_once():
    """A pipeline neighbour may also be the target of state."""
    async with transports(2) as (a, b):
        pending = b.receive(0, tag(), 4)
        await a.connect({1})
        a.send(1, tag(), made(torch.ones(1)))
        assert await outcome(pending) == torch.ones(1).numpy().tobytes()
        assert not b.receive(0, tag(1), 4).done


@on_both_loops
async def test_a_peer_that_is_gone_is_a_lost_peer():
    """Its port refuses; the error says whom we wanted."""
    async with transports(1, begin=False) as (a,):
        with socket.create_server((LOOPBACK, 0)) as server:
            gone = address_of(server)
        a.begin(3, KEY, {0: NOWHERE, 1: gone})
        with pytest.raises(ExceptionGroup) as caught:
            await a.connect({1})
        (error,) = caught.value.exceptions
        assert isinstance(error, PeerLost)
        assert str(error) == "rank 1 does not accept generation 3"


@pytest.mark.parametrize(
    ("generation", "key", "rank"),
    [(1, b"x" * 32, 1), (2, KEY, 1), (4, KEY, 1), (3, KEY, 7)],
    ids=["wrong key", "old generation", "generation to come", "no member"],
)
@on_both_loops
async def test_who_does_not_belong_to_the_generation_is_refused(
    generation: int, key: bytes, rank: int
):
    """[S1] For as long as the time-out says, and without disturbing those who do."""
    stranger = Transport("job", rank, timeout_s=NEAR_S)
    async with transports(2, begin=False) as ranks:
        addresses = addresses_of(ranks)
        generation = 3 if key != KEY else generation
        await begin_all(ranks, addresses, 3)
        stranger.begin(generation, key, addresses)
        pending = ranks[0].receive(1, tag(), 4)
        with pytest.raises(ExceptionGroup) as caught:
            await stranger.connect({0})
        assert [type(error) for error in caught.value.exceptions] == [PeerLost]
        assert not pending.done
        ranks[1].send(0, tag(), made(torch.ones(1)))
        await outcome(pending)


@on_both_loops
async def test_another_job_is_refused():
    """Its rank 1 is not our rank 1, even if it knew our key."""
    stranger = Transport("other", 1, timeout_s=NEAR_S)
    async with transports(1, begin=False) as (a,):
        a.begin(1, KEY, {0: NOWHERE, 1: NOWHERE})
        stranger.begin(1, KEY, addresses_of([a]))
        with pytest.raises(ExceptionGroup):
            await stranger.connect({0})


@on_both_loops
async def test_nobody_gets_in_between_two_generations():
    """After the end of one even its own members are refused."""
    async with transports(2) as (a, b):
        b.end()
        assert isinstance(await handshake_error(b, rank=0, generation=1), AuthError)
        assert isinstance(b.receive(0, tag(), 4).error, GenerationClosed)
        a.end()


@on_both_loops
async def test_nobody_gets_in_before_the_first_generation():
    """There is no key yet, and an empty one opens nothing."""
    async with transports(1, begin=False) as (a,):
        for generation in (0, 1):
            error = await handshake_error(a, rank=0, generation=generation, key=b"")
            assert isinstance(error, AuthError)


@on_both_loops
async def test_ending_while_connecting_is_no_lost_peer():
    """The generation is over, so nobody is missed."""
    async with transports(2, begin=False) as ranks:
        a, b = ranks
        a.begin(1, KEY, addresses_of(ranks))
        connecting = asyncio.create_task(a.connect({1}))
        while not b.num_refused:
            await asyncio.sleep(0)
        a.end()
        async with asyncio.timeout(FAR_S):
            with pytest.raises(ExceptionGroup) as caught:
                await connecting
        assert [type(error) for error in caught.value.exceptions] == [GenerationClosed]


@on_both_loops
async def test_connecting_after_the_end_is_no_lost_peer():
    """Whoever builds a generation may learn of its end only after a wait."""
    async with transports(2) as (a, _):
        a.end()
        with pytest.raises(ExceptionGroup) as caught:
            await a.connect({1})
        assert [type(error) for error in caught.value.exceptions] == [GenerationClosed]


@on_both_loops
async def test_garbage_from_a_stranger_disturbs_nobody():
    """Unauthenticated bytes reach no mailbox."""
    async with transports(2) as (a, b):
        pending = b.receive(0, tag(), 4)
        for garbage in (b"\xff" * 100, b"\x00\x00\x00\x01x", header(1, tag(), 4) + b"abcd"):
            reader, writer = await asyncio.open_connection(*place_of(b))
            writer.write(garbage)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""  # refused
            writer.close()
        assert not pending.done
        a.send(1, tag(), made(torch.ones(1)))
        await outcome(pending)


# --- members that misbehave


def header(generation: int, what: Tag, length: int) -> bytes:
    return struct.pack("!IBIHHIHQ", generation, *what, length)


@asynccontextmanager
async def impostor(
    target: Transport, *, rank: int, generation: int = 1, key: bytes = KEY
) -> AsyncIterator[asyncio.StreamWriter]:
    """An authenticated connection on which anything can be written."""
    reader, writer = await asyncio.open_connection(*place_of(target))
    try:
        identity = Identity("job", "executor", rank, generation)
        await connect_handshake(reader, writer, key, identity, timeout_s=FAR_S)
        yield writer
    finally:
        writer.close()


async def handshake_error(
    target: Transport, *, rank: int, generation: int, key: bytes = KEY
) -> BaseException:
    try:
        async with impostor(target, rank=rank, generation=generation, key=key):
            raise AssertionError("it got in")
    except AuthError as error:
        return error


@on_both_loops
async def test_a_payload_of_another_generation_breaks_the_connection():
    """[S1] Each frame carries its generation, not only the handshake."""
    async with transports(1, begin=False) as (a,):
        a.begin(2, KEY, {0: NOWHERE, 1: NOWHERE})
        pending = a.receive(1, tag(), 4)
        async with impostor(a, rank=1, generation=2) as writer:
            writer.write(header(1, tag(), 4) + b"abcd")
            error = await error_of(pending)
        assert isinstance(error, PeerLost)
        assert isinstance(error.__cause__, AuthError)


@on_both_loops
async def test_a_second_payload_under_one_tag_breaks_the_connection():
    """One of them would have to be dropped, and nobody knows which."""
    async with transports(1, begin=False) as (a,):
        a.begin(1, KEY, {0: NOWHERE, 1: NOWHERE})
        other = a.receive(1, tag(2), 4)
        async with impostor(a, rank=1) as writer:
            writer.write((header(1, tag(1), 4) + b"abcd") * 2)
            error = await error_of(other)
        assert isinstance(error.__cause__, AuthError)


@pytest.mark.parametrize("length", [(1 << 30) + 1, 1 << 40, (1 << 64) - 1])
@on_both_loops
async def test_a_payload_above_the_limit_breaks_the_connection(length: int):
    """[S2] Before anything is allocated for it."""
    async with transports(1, begin=False) as (a,):
        a.begin(1, KEY, {0: NOWHERE, 1: NOWHERE})
        pending = a.receive(1, tag(), 4)
        async with impostor(a, rank=1) as writer:
            writer.write(header(1, tag(), length))
            error = await error_of(pending)
        assert isinstance(error.__cause__, AuthError)


@on_both_loops
async def test_what_nobody_asks_for_is_limited_in_sum(monkeypatch: pytest.MonkeyPatch):
    """Small messages add up; claimed ones do not count any more."""
    monkeypatch.setattr(module, "MAX_UNCLAIMED_BYTES", 100)
    async with transports(2) as (a, b):
        for n in range(20):
            follower = b.receive(0, tag(n, chunk=1), 40)
            a.send(1, tag(n), made(torch.zeros(10)))
            a.send(1, tag(n, chunk=1), made(torch.zeros(10)))
            assert isinstance(await outcome(follower), memoryview)
            assert len(b.receive(0, tag(n), 40).wait()) == 40
        pending = b.receive(0, tag(99), 4)
        for n in range(20, 23):
            a.send(1, tag(n), made(torch.zeros(10)))
        assert isinstance(await error_of(pending), PeerLost)


@on_both_loops
async def test_what_is_asked_for_may_be_larger_than_that(monkeypatch: pytest.MonkeyPatch):
    """At exactly its size: the receiver has said how much memory it has for it."""
    monkeypatch.setattr(module, "MAX_UNCLAIMED_BYTES", 100)
    async with transports(2) as (a, b):
        pending = b.receive(0, tag(), 4000)
        a.send(1, tag(), made(torch.ones(1000)))
        assert await outcome(pending) == torch.ones(1000).numpy().tobytes()
        other = b.receive(0, tag(1), 4004)
        a.send(1, tag(1), made(torch.ones(1000)))
        assert isinstance((await error_of(other)).__cause__, AuthError)


@on_both_loops
async def test_a_second_connection_of_a_member_is_refused():
    """Two of them could overtake each other, and the end of one would look like its death."""
    async with transports(2) as (a, b):
        pending = b.receive(0, tag(), 4)
        async with impostor(b, rank=0) as writer:
            writer.write(header(1, tag(), 4) + b"fake")
            await writer.drain()
            while not b.num_refused:
                await asyncio.sleep(0)
        assert not pending.done
        a.send(1, tag(), made(torch.ones(1)))
        assert await outcome(pending) == torch.ones(1).numpy().tobytes()


def test_a_link_that_closed_while_it_read_still_has_room():
    """uvloop may ask once more, and takes a buffer without room for an error of its own."""

    class Closed:
        """Turns everybody away."""

        def admit(self, identity):
            raise AuthError("nobody")

        def enter(self, link, identity):
            raise AssertionError(identity)

        def turned_away(self, link, error):
            assert isinstance(error, FrameError)

    link = Incoming(Closed(), timeout_s=FAR_S)
    buffer = link.get_buffer(-1)
    buffer[:] = b"\xff" * len(buffer)
    link.buffer_updated(len(buffer))
    assert len(link.get_buffer(-1)) > 0
    link.buffer_updated(1)
