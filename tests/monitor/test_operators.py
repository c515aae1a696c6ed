"""Operators' requests at a monitor whose coordinator is replaced while they wait."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
import pytest
from coordinator_cases import SECRET

from resihp.monitor.node.operators import Operators
from resihp.wire.auth import Identity
from resihp.wire.channel import Channel, FrameChannel, accept_handshake, connect_handshake
from resihp.wire.messages import KillRank, Message, Refused, Reply, Wish, encode
from resihp.wire.nodes import FromOperator, NodeChannel
from resihp.wire.timing import Timing

TIMING = msgspec.structs.replace(Timing.from_detect_within(0.1), handshake_s=1.0)
LONG_S = 20.0
SAVE = Wish(what="checkpoint")
C = TypeVar("C", bound=FrameChannel)


@asynccontextmanager
async def pair(kind: type[C]) -> AsyncIterator[tuple[C, C]]:
    """Both ends of a sealed connection."""
    ends = [await asyncio.open_connection(sock=sock) for sock in socket.socketpair()]
    identity = Identity("job", "operator", 0, 0)
    connecting = connect_handshake(*ends[0], SECRET, identity, timeout_s=LONG_S)
    accepting = accept_handshake(*ends[1], SECRET, lambda _: None, timeout_s=LONG_S)
    ours, (_, *theirs) = await asyncio.gather(connecting, accepting)
    here, there = kind(*ends[0], ours), kind(*ends[1], (theirs[0], theirs[1]))
    try:
        yield here, there
    finally:
        here.close()
        there.close()


async def told(coordinator: NodeChannel) -> FromOperator:
    """What a coordinator hears next."""
    async with asyncio.timeout(LONG_S):
        message = await coordinator.receive()
    assert isinstance(message, FromOperator)
    return message


async def after_a_takeover(request: Message) -> tuple[list[FromOperator], Message | None]:
    """What the second coordinator hears once it leads, and what the operator is told at last."""
    operators = Operators(TIMING)
    async with pair(Channel) as (operator, here), pair(NodeChannel) as (leader, first):
        operator.send(request)
        serving = asyncio.create_task(operators.serve(here, leader))
        await told(first)
        async with pair(NodeChannel) as (leader, second):
            for _ in range(3):  # it says with each beat that it leads
                operators.led(leader)
            leader.send(FromOperator(number=99, payload=b""))
            heard: list[FromOperator] = []
            while (message := await told(second)).number != 99:
                heard.append(message)
            for message in heard:
                operators.answer(message.number, encode(Reply(text="done")))
                operators.answer(message.number, encode(Reply(text="done twice")))
            answer = await operator.receive()
            await serving
    return heard, answer


@pytest.mark.asyncio
async def test_a_wish_is_said_again_to_the_coordinator_that_takes_over() -> None:
    """Once, and the operator has one answer."""
    heard, answer = await after_a_takeover(SAVE)
    assert [message.payload for message in heard] == [encode(SAVE)]
    assert answer == Reply(text="done")


@pytest.mark.asyncio
async def test_an_order_is_not_said_again() -> None:
    """A kill may have been carried out: the operator is told to look, and to try again."""
    heard, answer = await after_a_takeover(KillRank(rank=1))
    assert heard == []
    assert answer == Refused(text="the coordinator does not answer; try again")
