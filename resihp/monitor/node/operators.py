"""Operators at a monitor: their requests go on to the coordinator, its answers come back."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import NamedTuple

from resihp.errors import WireError
from resihp.wire.channel import Channel
from resihp.wire.messages import AskClock, ClockAt, Refused, Wish, decode, encode
from resihp.wire.nodes import FromOperator, NodeChannel
from resihp.wire.timing import Timing

__all__ = ["Operators"]


_ASK_CLOCK = encode(AskClock())


class _Request(NamedTuple):
    payload: bytes
    answer: asyncio.Future[bytes]
    is_wish: bool
    """It takes a while, and may be said again to another coordinator."""


class Operators:
    """Requests that wait for an answer."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._numbers = itertools.count()
        self._waiting: dict[int, _Request] = {}
        self._led_by: NodeChannel | None = None

    async def serve(self, channel: Channel, leader: NodeChannel | None) -> None:
        """One request of one operator, and the answer; TimeoutError where it asks nothing."""
        async with asyncio.timeout(self._timing.handshake_s):
            request = await channel.receive_payload()
        if request is None:
            return
        if request == _ASK_CLOCK:
            channel.send(ClockAt(wall_s=time.time()))
        else:
            channel.send_payload(await self._ask(request, leader))
        await channel.drain(self._timing.grace_s)

    async def _ask(self, payload: bytes, leader: NodeChannel | None) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        request = _Request(payload, answer, _is_wish(payload))
        if leader is None and not request.is_wish:
            return encode(Refused(text="no coordinator at the moment; try again"))
        number = next(self._numbers)
        self._waiting[number] = request
        if leader is not None:
            leader.send(FromOperator(number=number, payload=payload))
        bound_s = self._timing.handshake_s + (self._timing.wish_s if request.is_wish else 0.0)
        try:
            async with asyncio.timeout(bound_s):
                return await answer
        except TimeoutError:
            return encode(Refused(text="the coordinator does not answer; try again"))
        finally:
            del self._waiting[number]

    def led(self, leader: NodeChannel) -> None:
        """The coordinator on `leader` leads: what it did not hear before is said again, once."""
        if leader is self._led_by:
            return
        self._led_by = leader
        for number, request in self._waiting.items():
            if request.is_wish:
                leader.send(FromOperator(number=number, payload=request.payload))

    def leave(self) -> None:
        """The job is over, and nobody will answer any more."""
        for number in self._waiting:
            self.answer(number, encode(Refused(text="the job is over")))

    def answer(self, number: int, payload: bytes) -> None:
        """What the coordinator says to a request; too late, and nobody waits for it."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_result(payload)


def _is_wish(payload: bytes) -> bool:
    try:
        return isinstance(decode(payload), Wish)
    except WireError:
        return False  # the coordinator tells the operator
