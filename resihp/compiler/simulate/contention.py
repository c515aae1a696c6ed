"""The same play where transfers share links: an event at a time, in the order of time.

Every transfer keeps its links for its bytes over their bandwidth and waits until those before it
have left them; whoever posts first goes first, on all links of a transfer together. Latency and
the gather at the end keep no link. Links are:

* between nodes, the adapters of the two: those that leave the sender's and those that enter the
  receiver's. A transfer of n messages uses n of them (all, if there are fewer), from that of the
  first rank of its group on; devices share the adapters of their node evenly.
* inside a node, the way out of the sender's devices and the way into the receiver's.

Gradient reductions are priced as a whole and share links with nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate.course import Course
from resihp.compiler.simulate.prices import Places, lane_groups, of_crossings
from resihp.compiler.simulate.times import Floats, Prices
from resihp.ir.model import Group, Level

__all__ = ["Contended", "Loads", "contend", "loads_of"]


class Loads(NamedTuple):
    """What each crossing does to links."""

    occupied: Floats
    """Seconds that it keeps its links."""
    links: list[tuple[int, ...]]
    """Numbers of these links."""
    num_links: int


class Contended(NamedTuple):
    """How a play with shared links goes."""

    late: Floats
    """For `play`."""
    delay: Floats
    """From the send of each crossing until the tensor may be used, the wait for links included."""


def loads_of(course: Course, pricing: Pricing, places: Places) -> Loads:
    """The loads of all crossings."""
    crossings, lanes = course.crossings, course.arrays.lanes
    groups = lane_groups(course, places)
    numbers: dict[tuple[object, ...], int] = {}
    known: dict[tuple[int, int], tuple[int, ...]] = {}
    links: list[tuple[int, ...]] = []
    key: list[int] = (crossings.sender * lanes.num + crossings.receiver).tolist()
    for pair in key:
        here_and_there = divmod(pair, lanes.num)
        if here_and_there not in known:
            sender, receiver = (groups[lane] for lane in here_and_there)
            used = _links(pricing, sender, receiver)
            known[here_and_there] = tuple(numbers.setdefault(link, len(numbers)) for link in used)
        links.append(known[here_and_there])
    occupied = of_crossings(course, pricing, places, lambda crossing: crossing.occupied_s)
    return Loads(occupied, links, len(numbers))


def _links(pricing: Pricing, sender: Group, receiver: Group) -> list[tuple[object, ...]]:
    cluster = pricing.cluster
    here, there = cluster.node_of(sender.ranks[0]), cluster.node_of(receiver.ranks[0])
    if here == there:
        return [("out of", sender.name), ("into", receiver.name)]
    num_messages = max(sender.tp, receiver.tp)

    def adapters(group: Group) -> Iterable[int]:
        num_adapters, per_node = cluster.cluster.nics_per_node, cluster.cluster.gpus_per_node
        first = group.ranks[0] % per_node * num_adapters // per_node
        count = min(num_messages, num_adapters)
        return ((first + number) % num_adapters for number in range(count))

    return [
        *(("out of", here, adapter) for adapter in adapters(sender)),
        *(("into", there, adapter) for adapter in adapters(receiver)),
    ]


def contend(course: Course, prices: Prices, loads: Loads) -> Contended:
    """The play of a course with one lane per group. O(n log n) in the number of instructions."""
    return _Contest(course, prices, loads).run()


class _Contest:
    """Lanes meet events one after the other: sends, uses of what was sent, and reductions.

    An event is (instruction, kind, number): kind 0 is a send of crossing `number`, 1 a use of it,
    2 a reduction of stage `number`.
    """

    def __init__(self, course: Course, prices: Prices, loads: Loads) -> None:
        nodes, lanes = course.nodes, course.arrays.lanes
        self.course = course
        self.loads = loads
        self.delays: list[float] = prices.delay.tolist()
        self.occupied: list[float] = loads.occupied.tolist()
        elapsed = np.concatenate(([0.0], np.cumsum(prices.duration)))
        self.elapsed: list[float] = elapsed.tolist()
        late = np.zeros(course.num_entries)
        late[nodes.first] = -elapsed[lanes.start]
        self.late: list[float] = late.tolist()
        self.of_lane: list[float] = late[nodes.first[:-1]].tolist()
        self.events = self._events()
        self.next = [0] * lanes.num
        self.free = [0.0] * loads.num_links
        self.arrival: list[float | None] = [None] * len(self.delays)
        self.posted = [0.0] * len(self.delays)
        self.waiting: dict[int, int] = {}
        """Lane that waits for a crossing."""
        self.entries = (nodes.user + 1).tolist()
        self.meeting_entry = dict(
            zip(
                zip(course.meetings.lane.tolist(), course.meetings.stage.tolist(), strict=True),
                (nodes.meeting + 1).tolist(),
                strict=True,
            )
        )
        self.members = np.bincount(course.meetings.stage, minlength=course.num_stages).tolist()
        self.arrived: list[list[int]] = [[] for _ in range(course.num_stages)]
        self.agenda: list[tuple[float, int]] = []

    def _events(self) -> list[list[tuple[int, int, int]]]:
        course = self.course
        crossings, meetings = course.crossings, course.meetings
        after = course.arrays.plan.level is Level.SCHEDULE
        sends = np.stack((crossings.sent + after, np.zeros_like(crossings.sent)))
        uses = np.stack((course.position[course.nodes.user + 1], np.ones_like(crossings.use)))
        meets = np.stack((meetings.at, np.full_like(meetings.at, 2)))
        kinds = np.concatenate((sends, uses, meets), axis=1)
        number = np.arange(len(crossings.sent))
        numbers = np.concatenate((number, number, meetings.stage))
        lane = np.concatenate((crossings.sender, crossings.receiver, meetings.lane))
        order = np.lexsort((kinds[1], kinds[0], lane))
        events: list[list[tuple[int, int, int]]] = [[] for _ in range(course.arrays.lanes.num)]
        columns: list[list[int]] = [c[order].tolist() for c in (lane, *kinds, numbers)]
        lanes, instrs, which, each = columns
        for at, *event in zip(lanes, instrs, which, each, strict=True):
            events[at].append((event[0], event[1], event[2]))
        return events

    def run(self) -> Contended:
        """All events; a course has no lane that waits for ever."""
        for lane in range(len(self.events)):
            self._plan(lane)
        heapify(self.agenda)
        while self.agenda:
            time, lane = heappop(self.agenda)
            _, kind, number = self.events[lane][self.next[lane]]
            if kind == 0:
                self._send(number, time)
            elif kind == 1:
                if not self._use(lane, number, time):
                    continue
            elif not self._meet(lane, number, time):
                continue
            self.next[lane] += 1
            self._plan(lane)
        arrival = np.array(self.arrival, np.float64)
        return Contended(np.array(self.late), arrival - np.array(self.posted))

    def _plan(self, lane: int) -> None:
        """Put the next event of a lane on the agenda."""
        if self.next[lane] < len(self.events[lane]):
            instr = self.events[lane][self.next[lane]][0]
            heappush(self.agenda, (self.of_lane[lane] + self.elapsed[instr], lane))

    def _send(self, number: int, time: float) -> None:
        links = self.loads.links[number]
        begin = max(time, *(self.free[link] for link in links))
        for link in links:
            self.free[link] = begin + self.occupied[number]
        self.posted[number] = time
        self.arrival[number] = begin + self.delays[number]
        if number in self.waiting:
            lane = self.waiting.pop(number)
            heappush(self.agenda, (begin + self.delays[number], lane))

    def _use(self, lane: int, number: int, time: float) -> bool:
        arrival = self.arrival[number]
        if arrival is None:
            self.waiting[number] = lane
            return False
        self._go_on(lane, self.entries[number], max(time, arrival))
        return True

    def _meet(self, lane: int, stage: int, time: float) -> bool:
        """The last one lets all others go on."""
        self.arrived[stage].append(lane)
        if len(self.arrived[stage]) < self.members[stage]:
            return False
        for member in self.arrived[stage]:
            self._go_on(member, self.meeting_entry[member, stage], time)
            if member != lane:
                self.next[member] += 1
                self._plan(member)
        return True

    def _go_on(self, lane: int, entry: int, time: float) -> None:
        """A lane passes a node at `time`."""
        instr = self.events[lane][self.next[lane]][0]
        self.of_lane[lane] = max(self.of_lane[lane], time - self.elapsed[instr])
        self.late[entry] = self.of_lane[lane]
