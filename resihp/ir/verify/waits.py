"""Who waits for whom in a deadlock, and the shortest circle of it.

A node of the wait-for graph is an instruction: the one at which a stream is stuck, or the head of
a queue of posted transfers. A link leads to the instruction that must end first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from resihp.ir.model import GroupName
from resihp.ir.timeline import Player
from resihp.ir.transfers import At, Transfer

__all__ = ["Link", "circles"]


class Link(NamedTuple):
    """`source` waits for `awaited`, which comes after `target`."""

    source: At
    awaited: At
    target: At
    queued: bool
    """`awaited` is posted and stands behind `target` in a queue; otherwise in its stream."""


def circles(player: Player, stuck: dict[GroupName, int]) -> Iterator[list[Link]]:
    """Shortest circles first, each with no lane of an earlier one."""
    links = _links(player, stuck)
    while circle := _shortest(links):
        yield circle
        lanes = {link.source.name for link in circle}
        links = {source: out for source, out in links.items() if source.name not in lanes}


def _links(player: Player, stuck: dict[GroupName, int]) -> dict[At, list[Link]]:
    """The wait-for graph, from the stuck streams on."""
    links: dict[At, list[Link]] = {}
    unseen = [At(name, index) for name, index in stuck.items()]
    while unseen:
        source = unseen.pop()
        if source not in links:
            links[source] = list(_links_of(player, stuck, source))
            unseen += (link.target for link in links[source] if link.target not in links)
    return links


def _links_of(player: Player, stuck: dict[GroupName, int], source: At) -> Iterator[Link]:
    name, index = source
    missing = [need for need in player.needs[name].get(index, ()) if need.done is None]
    meeting = player.lanes[name].meeting(index)
    if missing:
        for needed in missing:
            yield from _transfer_links(player, stuck, source, needed)
    elif meeting is not None:
        for other, at in player.members[meeting].items():
            if stuck.get(other, at) < at:
                yield Link(source, At(other, at), At(other, stuck[other]), queued=False)
    else:
        yield from _transfer_links(player, stuck, source, player.posts[name][index])


def _transfer_links(
    player: Player, stuck: dict[GroupName, int], source: At, transfer: Transfer
) -> Iterator[Link]:
    for awaited, behind in player.queues.waits(transfer, source.name):
        target = At(awaited.name, stuck[awaited.name]) if behind is None else behind
        yield Link(source, awaited, target, queued=behind is not None)


def _shortest(links: dict[At, list[Link]]) -> list[Link]:
    """A shortest circle; empty if there is none."""
    best: list[Link] = []
    for start in _on_circles(links):
        best = _circle_through(links, start, len(best) or len(links) + 1) or best
        if len(best) == 2:
            break
    return best


def _on_circles(links: dict[At, list[Link]]) -> list[At]:
    """Nodes that may lie on a circle: without those that nothing waits for, again and again."""
    num_waiting = dict.fromkeys(links, 0)
    for out in links.values():
        for link in out:
            if link.target in num_waiting:
                num_waiting[link.target] += 1
    idle = [node for node, count in num_waiting.items() if not count]
    while idle:
        for link in links[idle.pop()]:
            if link.target in num_waiting:
                num_waiting[link.target] -= 1
                if not num_waiting[link.target]:
                    idle.append(link.target)
    return [node for node, count in num_waiting.items() if count]


def _circle_through(links: dict[At, list[Link]], start: At, shorter_than: int) -> list[Link]:
    """A shortest circle through `start` of fewer than `shorter_than` links; empty if none."""
    came_by: dict[At, Link] = {}
    depth = {start: 0}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        if depth[node] + 1 >= shorter_than:
            return []
        for link in links[node]:
            if link.target == start:
                circle = [link]
                while circle[-1].source != start:
                    circle.append(came_by[circle[-1].source])
                return circle[::-1]
            if link.target in links and link.target not in depth:
                depth[link.target] = depth[node] + 1
                came_by[link.target] = link
                queue.append(link.target)
    return []
