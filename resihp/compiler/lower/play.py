"""A schedule played: every stream as early as its inputs are there, transfers taking no time."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from resihp.compiler.lower.steps import Lanes, Step, Tensor
from resihp.errors import UserError
from resihp.ir.model import GroupName, Op

__all__ = ["Ran", "play"]


class Ran(NamedTuple):
    """A step of a group that is over."""

    name: GroupName
    step: Step
    start: float
    end: float


def play(lanes: Lanes, cost: Mapping[Op, float]) -> Iterator[Ran]:
    """Every step of all lanes, in the order in which they end.

    Each comes after all that it needs, and after those before it in its lane. What ends at one
    time comes in the order of the lanes; a meeting comes once for each of its groups, in a row.

    Raises UserError where steps wait for each other, or for what nobody makes.
    """
    return _Player(lanes, cost).run()


class _Player:
    def __init__(self, lanes: Lanes, cost: Mapping[Op, float]) -> None:
        self.lanes = lanes
        self.cost = cost
        self.places = {name: place for place, name in enumerate(lanes)}
        self.next = dict.fromkeys(lanes, 0)
        self.made: set[Tensor] = set()
        self.waiting: dict[Tensor, GroupName] = {}
        self.ready: deque[GroupName] = deque(lanes)
        self.running: list[tuple[float, int, GroupName, float]] = []
        """(end, place of the lane, lane, start), as a heap."""
        self.members = _members(lanes)
        self.arrived: dict[tuple[Op, int | None], list[GroupName]] = defaultdict(list)

    def run(self) -> Iterator[Ran]:
        time = 0.0
        while self.ready or self.running:
            while self.ready:
                yield from self._start(self.ready.popleft(), time)
            if self.running:
                time = self.running[0][0]
                while self.running and self.running[0][0] == time:
                    _, _, name, start = heapq.heappop(self.running)
                    yield self._end(name, start, time)
        for name, steps in self.lanes.items():
            if self.next[name] < len(steps):
                instr = steps[self.next[name]].instrs[0]
                raise UserError(
                    f"`{instr.op.mnemonic} {instr.microbatch}` in {name} waits for ever; "
                    "`resihp verify` tells more"
                )

    def _start(self, name: GroupName, time: float) -> Iterator[Ran]:
        """Start the next step of a lane, unless it has to wait."""
        steps, index = self.lanes[name], self.next[name]
        if index == len(steps):
            return
        step = steps[index]
        for tensor, _ in step.needs:
            if tensor not in self.made:
                self.waiting[tensor] = name
                return
        if step.is_meeting:
            yield from self._meet(name, step, time)
            return
        end = time + sum(self.cost[instr.op] for instr in step.instrs)
        heapq.heappush(self.running, (end, self.places[name], name, time))

    def _meet(self, name: GroupName, step: Step, time: float) -> Iterator[Ran]:
        meeting = step.instrs[0].op, step.stages[0]
        arrived = self.arrived[meeting]
        arrived.append(name)
        if len(arrived) == self.members[meeting]:
            for member in sorted(arrived, key=self.places.__getitem__):
                yield self._end(member, time, time)

    def _end(self, name: GroupName, start: float, time: float) -> Ran:
        step = self.lanes[name][self.next[name]]
        self.next[name] += 1
        self.ready.append(name)
        for tensor, _ in step.makes:
            self.made.add(tensor)
            if tensor in self.waiting:
                self.ready.append(self.waiting.pop(tensor))
        return Ran(name, step, start, time)


def _members(lanes: Lanes) -> dict[tuple[Op, int | None], int]:
    """How many groups come to each meeting."""
    members: dict[tuple[Op, int | None], int] = defaultdict(int)
    for steps in lanes.values():
        for step in steps:
            if step.is_meeting:
                members[step.instrs[0].op, step.stages[0]] += 1
    return members
