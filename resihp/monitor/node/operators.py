"""Operators at a monitor: their requests go on to the coordinator, its answers come back."""

from __future__ import annotations

import asyncio
import itertools
import time

from resihp.wire.channel import Channel
from resihp.wire.messages import AskClock, ClockAt, Refused, encode
from resihp.wire.nodes import FromOperator, NodeChannel
from resihp.wire.timing import Timing

__all__ = ["Operators"]


_ASK_CLOCK = encode(AskClock())


class Operators:
    """Requests that wait for an answer."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

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

    async def _ask(self, request: bytes, leader: NodeChannel | None) -> bytes:
        if leader is None:
            return encode(Refused(text="no coordinator at the moment; try again"))
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        leader.send(FromOperator(number=number, payload=request))
        try:
            async with asyncio.timeout(self._timing.handshake_s):
                return await answer
        except TimeoutError:
            return encode(Refused(text="the coordinator does not answer; try again"))
        finally:
            del self._waiting[number]

    def answer(self, number: int, payload: bytes) -> None:
        """What the coordinator says to a request; too late, and nobody waits for it."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(payload)
