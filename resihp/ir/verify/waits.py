"""Who waits for whom in a deadlock, and the shortest circle of it.

A node of the wait-for graph is an instruction: the one at which a stream is stuck, or the head of
a queue of posted transfers. A link leads to the instruction that must end first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from resihp.ir.lanes import Meeting
from resihp.ir.model import GroupName
from resihp.ir.timeline import Player
from resihp.ir.transfers import At, Transfer

__all__ = ["Link", "circles"]

_MOST_LATE = 16
"""Of those that a rendezvous misses, how many are followed."""


class Link(NamedTuple):
    """`source` waits for `awaited`, which comes after `target`."""

    source: At
    awaited: At
    target: At
    queued: bool
    """`awaited` is posted and stands behind `target` in a queue; otherwise in its stream."""


_Links = dict[At, list[Link]]


def circles(
    player: Player, stuck: dict[GroupName, int], most_looks: int = 1_000_000
) -> Iterator[list[Link]]:
    """Shortest circles first, each with no lane of an earlier one.

    One at least wherever a lane is stuck. After `most_looks` at links, in a plan of thousands of
    groups, the search is cut short: further circles may be missing, the last one may not be a
    shortest.
    """
    links = _Graph(player, stuck).links()
    looks = _Looks(most_looks)
    while circle := _shortest(links, looks):
        yield circle
        if not looks.left:
            break
        lanes = {link.source.name for link in circle}
        links = {source: out for source, out in links.items() if source.name not in lanes}


class _Graph:
    """Builds the wait-for graph, from the stuck streams on."""

    def __init__(self, player: Player, stuck: dict[GroupName, int]) -> None:
        self.player = player
        self.stuck = stuck
        self.late: dict[Meeting, list[At]] = {}
        """Where those stand that a rendezvous misses."""

    def links(self) -> _Links:
        links: _Links = {}
        unseen = [At(name, index) for name, index in self.stuck.items()]
        while unseen:
            source = unseen.pop()
            if source not in links:
                links[source] = list(self._links_of(source))
                unseen += (link.target for link in links[source] if link.target not in links)
        return links

    def _links_of(self, source: At) -> Iterator[Link]:
        name, index = source
        missing = [need for need in self.player.needs[name].get(index, ()) if need.done is None]
        meeting = self.player.lanes[name].meeting(index)
        if missing:
            for needed in missing:
                yield from self._transfer_links(source, needed)
        elif meeting is not None:
            for awaited in self._late_for(meeting):
                target = At(awaited.name, self.stuck[awaited.name])
                yield Link(source, awaited, target, queued=False)
        else:
            yield from self._transfer_links(source, self.player.posts[name][index])

    def _late_for(self, meeting: Meeting) -> list[At]:
        if meeting not in self.late:
            late = (
                At(name, at)
                for name, at in self.player.members[meeting].items()
                if self.stuck.get(name, at) < at
            )
            self.late[meeting] = list(islice(late, _MOST_LATE))
        return self.late[meeting]

    def _transfer_links(self, source: At, transfer: Transfer) -> Iterator[Link]:
        for awaited, behind in self.player.queues.waits(transfer, source.name):
            target = At(awaited.name, self.stuck[awaited.name]) if behind is None else behind
            yield Link(source, awaited, target, queued=behind is not None)


class _Looks:
    """How many links may still be looked at."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, number: int) -> None:
        self.left = max(0, self.left - number)


def _shortest(links: _Links, looks: _Looks) -> list[Link]:
    """A shortest circle; empty if there is none. Any circle once there are no looks left."""
    best: list[Link] = []
    starts = _on_circles(links)
    looks.take(sum(map(len, links.values())))
    for start in starts:
        if len(best) == 2 or not looks.left:
            break
        best = _circle_through(links, start, len(best) or len(links) + 1, looks) or best
    return best or _any_circle(links, starts)


def _any_circle(links: _Links, starts: list[At]) -> list[Link]:
    """What going on from link to link leads to; empty if every way ends."""
    ended: set[At] = set()
    for start in starts:
        way: list[Link] = []
        entered: dict[At, int] = {}
        node = start
        while node not in ended and node not in entered:
            entered[node] = len(way)
            follow = next(
                (link for link in links[node] if link.target in links and link.target not in ended),
                None,
            )
            if follow is not None:
                way.append(follow)
                node = follow.target
            else:
                ended.add(node)
                if way:
                    node = way.pop().source
                    del entered[node]
        if node in entered:
            return way[entered[node] :]
    return []


def _on_circles(links: _Links) -> list[At]:
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


def _circle_through(links: _Links, start: At, shorter_than: int, looks: _Looks) -> list[Link]:
    """A shortest circle through `start` of fewer than `shorter_than` links; empty if none.

    Or if there are no looks left.
    """
    came_by: dict[At, Link] = {}
    depth = {start: 0}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        if depth[node] + 1 >= shorter_than or not looks.left:
            return []
        looks.take(len(links[node]))
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
