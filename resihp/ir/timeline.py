"""Earliest start and end of every instruction, and where streams get stuck.

The rules are those of `resihp.ir.transport`: each stream runs in order, posts its sends and
receives, and waits for a tensor where it needs it; `reduce_grads` waits for every stream that
reduces the same stage and `step` for all streams. An overlapped pair starts once the inputs of
both are there and shares the device: it takes as long as its two instructions, whose times are
given one after the other. In a schedule, which names no transfer, a result is there for others
as soon as it is made. A receive whose send does not exist counts as ready: that fault has its own
diagnostic.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from resihp.ir.lanes import Lane, Meeting
from resihp.ir.model import GroupName, Level, Op
from resihp.ir.transfers import Transfer, handovers_of, queues_of, transfers_of
from resihp.ir.transport import EDGE, Transport

__all__ = ["UNIT_COST", "Player", "Timeline", "play"]

UNIT_COST: Mapping[Op, float] = {Op.F: 1.0, Op.B: 1.0, Op.W: 1.0, Op.BW: 2.0}
"""Cost of each operation in a picture without measurements; others cost nothing."""


class Timeline(NamedTuple):
    """Times of each lane's instructions. Stuck lanes end where they got stuck."""

    starts: dict[GroupName, list[float]]
    ends: dict[GroupName, list[float]]
    stuck: dict[GroupName, int]
    """Lanes that wait for ever, with the index of the instruction that waits."""

    @property
    def makespan(self) -> float:
        """When the last instruction ends."""
        return max((ends[-1] for ends in self.ends.values() if ends), default=0.0)


def play(
    lanes: Mapping[GroupName, Lane],
    cost: Mapping[Op, float] = UNIT_COST,
    transport: Transport = EDGE,
    boundary_bytes: Mapping[GroupName, int] | None = None,
) -> Timeline:
    """Run all lanes as early as the transport allows. O(number of instructions).

    `boundary_bytes` are the sizes that `eager` needs: of a whole tensor that each group sends.
    """
    return Player(lanes, cost, transport, boundary_bytes).run()


class Player:
    """Runs lanes; afterwards its fields say where and why they are stuck."""

    def __init__(
        self,
        lanes: Mapping[GroupName, Lane],
        cost: Mapping[Op, float] = UNIT_COST,
        transport: Transport = EDGE,
        boundary_bytes: Mapping[GroupName, int] | None = None,
    ) -> None:
        self.lanes = lanes
        self.cost = [cost.get(op, 0.0) for op in Op]
        self.starts: dict[GroupName, list[float]] = {name: [] for name in lanes}
        self.ends: dict[GroupName, list[float]] = {name: [] for name in lanes}
        self.members = _members(lanes.values())
        self.arrived: dict[Meeting, dict[GroupName, float]] = defaultdict(dict)
        self.met_at: dict[Meeting, float] = {}
        self.ready: deque[GroupName] = deque(lanes)
        self.posts: dict[GroupName, dict[int, Transfer]] = {name: {} for name in lanes}
        """The transfer that each send and receive posts."""
        self.makes: dict[GroupName, dict[int, list[Transfer]]] = {name: {} for name in lanes}
        """In a schedule: what is there once an instruction has ended."""
        self.needs: dict[GroupName, dict[int, list[Transfer]]] = {name: {} for name in lanes}
        """What must be there for an instruction, or an overlapped pair, to start."""
        if any(lane.level is Level.SCHEDULE for lane in lanes.values()):
            transport, transfers = EDGE, list(handovers_of(lanes))
            for transfer in transfers:
                self.makes[transfer.sender].setdefault(transfer.send, []).append(transfer)
        else:
            transfers = list(transfers_of(lanes, boundary_bytes))
            for transfer in transfers:
                self.posts[transfer.sender][transfer.send] = transfer
                self.posts[transfer.receiver][transfer.recv] = transfer
        for transfer in transfers:
            if transfer.use is not None:
                start = lanes[transfer.receiver].head_of(transfer.use)
                self.needs[transfer.receiver].setdefault(start, []).append(transfer)
        self.queues = queues_of(transport, transfers, self.ready.append)

    def run(self) -> Timeline:
        """Run every lane until it ends or waits for ever."""
        while self.ready:
            self._advance(self.lanes[self.ready.popleft()])
        stuck = {
            name: len(self.ends[name])
            for name, lane in self.lanes.items()
            if len(self.ends[name]) < len(lane.body)
        }
        return Timeline(self.starts, self.ends, stuck)

    def _advance(self, lane: Lane) -> None:
        """Run `lane` until it waits or ends."""
        starts, ends = self.starts[lane.name], self.ends[lane.name]
        posts, makes = self.posts[lane.name], self.makes[lane.name]
        body, cost, pairs = lane.body, self.cost, lane.pairs
        while (index := len(ends)) < len(body):
            op = body[index].op
            time = self._inputs_there(lane.name, index, ends[-1] if ends else 0.0)
            if time is not None and (op is Op.REDUCE_GRADS or op is Op.STEP):
                time = self._meet(lane, index, time)
            elif time is not None and index in posts:
                time = self._post(lane, index, time)
            if time is None:
                return
            starts.append(time)
            ends.append(time + cost[op])
            if index in pairs:
                starts.append(ends[-1])
                ends.append(ends[-1] + cost[body[index + 1].op])
            if makes:
                for maker in range(index, len(ends)):
                    for made in makes.get(maker, ()):
                        self.queues.send(made, ends[-1])

    def _inputs_there(self, name: GroupName, index: int, time: float) -> float | None:
        """When all that the instruction needs is there, from `time` on; None while it is not."""
        for transfer in self.needs[name].get(index, ()):
            if transfer.done is None:
                return None
            time = max(time, transfer.done)
        return time

    def _post(self, lane: Lane, index: int, time: float) -> float | None:
        """When the lane goes on after its send or receive; None while it cannot."""
        transfer = self.posts[lane.name][index]
        if transfer.sender == lane.name:
            return self.queues.send(transfer, time)
        self.queues.receive(transfer, time)
        return time

    def _meet(self, lane: Lane, index: int, time: float) -> float | None:
        """When everybody had come; None while somebody is missing. The last one wakes all."""
        meeting = lane.meeting(index)
        if meeting is None:
            return time
        arrived, members = self.arrived[meeting], self.members[meeting]
        if meeting not in self.met_at:
            arrived.setdefault(lane.name, time)
            if len(arrived) < len(members):
                return None
            self.met_at[meeting] = max(arrived.values())
            self.ready.extend(name for name in members if name != lane.name)
        return max(time, self.met_at[meeting])


def _members(lanes: Iterable[Lane]) -> dict[Meeting, dict[GroupName, int]]:
    """Who takes part in each rendezvous, and where: every lane that has such an instruction."""
    members: dict[Meeting, dict[GroupName, int]] = defaultdict(dict)
    for lane in lanes:
        for meeting, index in lane.meets.items():
            members[meeting][lane.name] = index
    return members
