"""Clocks of this machine and of the nodes that answer.

No decision compares times of two machines: each node measures how long ago it heard whom with
its own monotonic clock. What differs between machines are the times in events and logs.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from resihp.errors import WireError
from resihp.monitor.doctor.finding import Finding, note, problem, well
from resihp.wire.address import Address
from resihp.wire.auth import Identity
from resihp.wire.channel import Channel, connect_handshake
from resihp.wire.messages import AskClock, ClockAt

__all__ = ["ClockReading", "Offset", "check_clock", "check_skew", "offset_of", "read_clocks"]

TOPIC = "clocks"
NUM_READINGS = 1000
COARSE_S = 1e-3
"""A clock with longer ticks cannot time a heartbeat."""
MAX_SKEW_S = 1.0
"""Beyond it, lines of two nodes can no longer be put in order by eye."""
ASK_S = 2.0
NUM_ASKED = 3


def check_clock(readings: Sequence[float] | None = None) -> Iterator[Finding]:
    """Whether the monotonic clock does what everything here relies on."""
    found = [time.monotonic() for _ in range(NUM_READINGS)] if readings is None else readings
    back_s = max(before - after for before, after in itertools.pairwise(found))
    if back_s > 0:
        yield problem(TOPIC, f"the monotonic clock went back by {back_s:g} s; no timeout holds")
        return
    info = time.get_clock_info("monotonic")
    if not info.monotonic or info.resolution > COARSE_S:
        yield problem(
            TOPIC, f"the monotonic clock ticks every {info.resolution:g} s only; no timeout holds"
        )
        return
    yield well(TOPIC, f"monotonic, ticks of {info.resolution * 1e9:.0f} ns{_source()}")


def _source() -> str:
    path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    try:
        return f", clock source {path.read_text(encoding='ascii').strip()}"
    except OSError:
        return ""


class ClockReading(NamedTuple):
    """Our wall clock before and after a question, and that of the node that was asked."""

    asked_s: float
    answered_s: float
    theirs_s: float


class Offset(NamedTuple):
    """How far a node's wall clock is ahead of ours, and how wrong that may be."""

    seconds: float
    error_s: float


def offset_of(readings: Iterable[ClockReading]) -> Offset:
    """From the reading with the shortest way, as if both ways had been equally long."""
    best = min(readings, key=lambda reading: reading.answered_s - reading.asked_s)
    half_s = (best.answered_s - best.asked_s) / 2
    return Offset(best.theirs_s - best.asked_s - half_s, half_s)


def check_skew(offsets: Sequence[tuple[str, Offset | str]]) -> Iterator[Finding]:
    """Of the wall clocks of nodes; those that did not answer say why."""
    for node, offset in offsets:
        if isinstance(offset, str):
            yield note(TOPIC, f"node {node} does not answer: {offset}")
        elif abs(offset.seconds) - offset.error_s > MAX_SKEW_S:
            yield problem(
                TOPIC,
                f"node {node}: its wall clock is {offset.seconds:+.3f} s from ours (within "
                f"{offset.error_s:.3f} s); decisions are not affected, but times in its events are",
            )
        else:
            yield well(TOPIC, f"node {node}: {offset.seconds:+.3f} s (within {offset.error_s:.3f})")


async def read_clocks(
    nodes: Sequence[Address], job: str, secret: bytes
) -> list[tuple[str, Offset | str]]:
    """Ask the monitors of a running job, all at once."""
    asked = [_ask(node, job, secret) for node in nodes]
    return [
        (str(node), found) for node, found in zip(nodes, await asyncio.gather(*asked), strict=True)
    ]


async def _ask(node: Address, job: str, secret: bytes) -> Offset | str:
    try:
        async with asyncio.timeout(ASK_S):
            return offset_of([await _read(node, job, secret) for _ in range(NUM_ASKED)])
    except ConnectionRefusedError:
        return "no job runs there"
    except (OSError, WireError, TimeoutError) as error:
        return str(error) or type(error).__name__


async def _read(node: Address, job: str, secret: bytes) -> ClockReading:
    reader, writer = await asyncio.open_connection(node.host, node.port)
    try:
        identity = Identity(job, "operator", 0, 0)
        seals = await connect_handshake(reader, writer, secret, identity, timeout_s=ASK_S)
        channel = Channel(reader, writer, seals)
        asked_s = time.time()
        channel.send(AskClock())
        answer = await channel.receive()
        answered_s = time.time()
    finally:
        writer.close()
    if not isinstance(answer, ClockAt):
        raise WireError("no answer of a monitor")
    return ClockReading(asked_s, answered_s, answer.wall_s)
