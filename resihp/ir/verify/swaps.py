"""Two instructions of one stream whose swap takes a circle out of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from resihp.ir.diagnostics import Diagnostic
from resihp.ir.lanes import Lane
from resihp.ir.model import GroupName, Instr, Plan
from resihp.ir.source import Parsed
from resihp.ir.verify.waits import Link

__all__ = ["Swap", "find_swap", "streams_of"]

_MOST_PLAYED = 24
_MOST_VERIFIED = 4
"""Bounds of the search per circle: swaps that are played, and of those that are verified."""
_MOST_INSTRUCTIONS = 20_000
"""In larger plans, counted without replicas that are alike, no swap is looked for."""


class Swap(NamedTuple):
    """Instructions `first < second` of a stream, and of all of its position that read the same."""

    stream: int
    first: int
    second: int


def find_swap(
    parsed: Parsed,
    lanes: Mapping[GroupName, Lane],
    circle: Sequence[Link],
    in_circles: Callable[[Mapping[GroupName, Lane]], set[GroupName]],
    verify: Callable[[Parsed], Sequence[Diagnostic]],
) -> Swap | None:
    """The first swap at the circle that lets its lanes go on and brings no new finding.

    `in_circles` gives the lanes that wait for each other in circles; `verify` must find deadlocks
    without looking for swaps.
    """
    if sum(len(lane.body) for lane in lanes.values()) > _MOST_INSTRUCTIONS:
        return None
    others = in_circles(lanes) - {link.source.name for link in circle}
    before: Counter[str] | None = None
    num_verified = 0
    for swap in islice(_candidates(lanes, circle), _MOST_PLAYED):
        twins = streams_of(parsed.plan, swap)
        plan = _swapped(parsed.plan, swap, twins)
        changed = {
            name: Lane(lane.group, lane.stream, plan, lane.placement)
            if lane.stream in twins
            else lane
            for name, lane in lanes.items()
        }
        if not in_circles(changed) <= others:
            continue
        before = _counted(verify(parsed)) if before is None else before
        after = _counted(verify(msgspec.structs.replace(parsed, plan=plan)))
        if after < before and after["RHP501"] < before["RHP501"]:
            return swap
        num_verified += 1
        if num_verified == _MOST_VERIFIED:
            break
    return None


def _counted(findings: Sequence[Diagnostic]) -> Counter[str]:
    return Counter(finding.code for finding in findings)


def streams_of(plan: Plan, swap: Swap) -> set[int]:
    """Streams that the swap is made in."""
    one = plan.streams[swap.stream]
    return {
        index
        for index, stream in enumerate(plan.streams)
        if stream.pp == one.pp and (stream.body is one.body or stream.body == one.body)
    }


def _swapped(plan: Plan, swap: Swap, twins: set[int]) -> Plan:
    body: list[Instr] = list(plan.streams[swap.stream].body)
    body[swap.first], body[swap.second] = body[swap.second], body[swap.first]
    # One object for all of them: that is how replicas are known to be alike.
    shared = tuple(body)
    streams = (
        msgspec.structs.replace(stream, body=shared) if index in twins else stream
        for index, stream in enumerate(plan.streams)
    )
    return msgspec.structs.replace(plan, streams=tuple(streams))


def _candidates(lanes: Mapping[GroupName, Lane], circle: Sequence[Link]) -> Iterator[Swap]:
    """What is awaited with what it comes after, then neighbours of both; nearest first."""
    seen: set[Swap] = set()
    for adjacent in (False, True):
        for link in circle:
            lane = lanes[link.awaited.name]
            blocker, awaited = link.target.position, link.awaited.position
            pairs = [(blocker, awaited)]
            if adjacent:
                pairs = [(awaited - 1, awaited), (blocker, blocker + 1), (blocker - 1, blocker)]
            for first, second in pairs:
                swap = Swap(lane.stream, first, second)
                if _is_possible(lane, first, second) and swap not in seen:
                    seen.add(swap)
                    yield swap


def _is_possible(lane: Lane, first: int, second: int) -> bool:
    """Whether both exist and neither is overlapped with another."""
    if not 0 <= first < second < len(lane.body):
        return False
    return all(at not in lane.pairs and at - 1 not in lane.pairs for at in (first, second))
