"""No deadlock: played as early as possible, every stream reaches its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from resihp.ir.diagnostics import Related, Span
from resihp.ir.lanes import Lane, name_of
from resihp.ir.model import GroupName
from resihp.ir.source import Parsed
from resihp.ir.timeline import meeting_of, message_of, play
from resihp.ir.verify.findings import Findings

__all__ = ["check_progress"]

_Waits = dict[GroupName, list[GroupName]]


def check_progress(parsed: Parsed, lanes: Mapping[GroupName, Lane], findings: Findings) -> None:
    """RHP501, once for every circle of lanes that has no lane in common with a shorter one."""
    stuck = play(lanes).stuck
    waits = {name: _waits_for(lanes, stuck, name) for name in stuck}
    while True:
        circle = _shortest_circle(waits)
        if not circle:
            return
        _report(parsed, lanes, stuck, circle, findings)
        for name in circle:
            del waits[name]


def _waits_for(
    lanes: Mapping[GroupName, Lane], stuck: dict[GroupName, int], name: GroupName
) -> list[GroupName]:
    """The stuck lanes that `name` cannot go on without."""
    lane, index = lanes[name], stuck[name]
    message = message_of(lane, index)
    if message is not None:
        return [message.sender]
    meeting = meeting_of(lane, index)
    assert meeting is not None, "only receives and rendezvous wait"
    return [
        other
        for other in stuck
        if (at := _meeting_index(lanes[other], lane, index)) is not None and stuck[other] < at
    ]


def _meeting_index(other: Lane, lane: Lane, index: int) -> int | None:
    """Where `other` takes part in the rendezvous of `lane`'s instruction `index`."""
    at = other.meets.get(lane.body[index].op)
    if at is None or meeting_of(other, at) != meeting_of(lane, index):
        return None
    return at


def _shortest_circle(waits: _Waits) -> list[GroupName]:
    """A shortest circle of the wait-for graph, from the first lane that lies on one."""
    best: list[GroupName] = []
    for start in waits:
        circle = _circle_through(waits, start, len(best) or len(waits) + 1)
        if circle:
            best = circle
            if len(best) == 2:
                break
    return best


def _circle_through(waits: _Waits, start: GroupName, shorter_than: int) -> list[GroupName]:
    """A shortest circle through `start` of fewer than `shorter_than` lanes; empty if none."""
    came_from: dict[GroupName, GroupName] = {}
    depth = {start: 0}
    queue = deque([start])
    while queue:
        name = queue.popleft()
        if depth[name] + 1 >= shorter_than:
            return []
        for following in waits[name]:
            if following == start:
                circle = [name]
                while circle[-1] != start:
                    circle.append(came_from[circle[-1]])
                return circle[::-1]
            if following in waits and following not in depth:
                depth[following] = depth[name] + 1
                came_from[following] = name
                queue.append(following)
    return []


def _report(
    parsed: Parsed,
    lanes: Mapping[GroupName, Lane],
    stuck: dict[GroupName, int],
    circle: list[GroupName],
    findings: Findings,
) -> None:
    """Start at the first line of the text that takes part, then follow the circle."""
    places = {name: parsed.streams[lanes[name].stream].span(stuck[name]) for name in circle}
    start = min(range(len(circle)), key=lambda at: (places[circle[at]], circle[at]))
    circle = circle[start:] + circle[:start]
    related: list[Related] = []
    for name, following in zip(circle, [*circle[1:], circle[0]], strict=True):
        what, span = _awaited(parsed, lanes[name], stuck[name], lanes[following])
        related.append(Related(f"{name} waits here for {following}", places[name]))
        related.append(Related(f"... which runs {what} only later", span))
    chain = ", which waits for ".join(str(name) for name in [*circle[1:], circle[0]])
    findings.add(
        "RHP501",
        places[circle[0]],
        f"deadlock: {circle[0]} waits for {chain}",
        related=tuple(related),
        hint="a send never waits: move it, with the compute that makes it, before the receive "
        "that starts the circle",
        replica=circle[0].replica,
    )


def _awaited(parsed: Parsed, lane: Lane, index: int, other: Lane) -> tuple[str, Span]:
    """The instruction of `other` that `lane` waits for at `index`, and its place."""
    message = message_of(lane, index)
    if message is None:
        at = _meeting_index(other, lane, index)
        assert at is not None
        return f"`{other.body[at].op.mnemonic}`", parsed.streams[other.stream].span(at)
    at = other.first[message.op, message.micro_batch]
    number = name_of(message.micro_batch, other.name.replica)
    return f"`{message.op.mnemonic} {number}`", parsed.streams[other.stream].span(at)
