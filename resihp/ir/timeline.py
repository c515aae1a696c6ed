"""Earliest start and end of every instruction, and where streams get stuck.

The rules are those of `resihp.ir.transport`: each stream runs in order, posts its sends and
receives, and waits for a tensor where it needs it; `reduce_grads` waits for every stream of its
stage and `step` for all streams. A receive whose send does not exist counts as ready: that fault
has its own diagnostic.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from resihp.ir.lanes import Lane
from resihp.ir.model import GroupName, Op
from resihp.ir.transfers import Transfer, queues_of, transfers_of
from resihp.ir.transport import EDGE, Transport

__all__ = ["UNIT_COST", "Meeting", "Player", "Timeline", "meeting_of", "play"]

UNIT_COST: Mapping[Op, float] = {Op.F: 1.0, Op.B: 1.0, Op.W: 1.0, Op.BW: 2.0}
"""Cost of each operation in a picture without measurements; others cost nothing."""


class Meeting(NamedTuple):
    """A rendezvous: `reduce_grads` of a stage, or `step` (stage -1) of all lanes."""

    op: Op
    stage: int


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


def meeting_of(lane: Lane, index: int) -> Meeting | None:
    """The rendezvous that instruction `index` takes part in."""
    op = lane.body[index].op
    if op is Op.REDUCE_GRADS:
        return Meeting(op, lane.name.pp)
    return Meeting(op, -1) if op is Op.STEP else None


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
        self.needs: dict[GroupName, dict[int, Transfer]] = {name: {} for name in lanes}
        """The transfer that an instruction needs to have ended."""
        transfers = list(transfers_of(lanes, boundary_bytes))
        for transfer in transfers:
            self.posts[transfer.sender][transfer.send] = transfer
            self.posts[transfer.receiver][transfer.recv] = transfer
            if transfer.use is not None:
                self.needs[transfer.receiver][transfer.use] = transfer
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
        posts, needs = self.posts[lane.name], self.needs[lane.name]
        body, cost = lane.body, self.cost
        for index in range(len(ends), len(body)):
            op = body[index].op
            time = ends[-1] if ends else 0.0
            if index in needs:
                there = needs[index].done
                if there is None:
                    return
                time = max(time, there)
            if op >= Op.REDUCE_GRADS:
                met = self._meet(lane, index, time)
                if met is None:
                    return
                time = max(time, met)
            elif index in posts:
                went_on = self._post(lane, index, time)
                if went_on is None:
                    return
                time = went_on
            starts.append(time)
            ends.append(time + cost[op])

    def _post(self, lane: Lane, index: int, time: float) -> float | None:
        """When the lane goes on after its send or receive; None while it cannot."""
        transfer = self.posts[lane.name][index]
        if transfer.sender == lane.name:
            return self.queues.send(transfer, time)
        self.queues.receive(transfer, time)
        return time

    def _meet(self, lane: Lane, index: int, time: float) -> float | None:
        """When everybody had come; None while somebody is missing. The last one wakes all."""
        meeting = meeting_of(lane, index)
        assert meeting is not None
        arrived, members = self.arrived[meeting], self.members[meeting]
        if meeting not in self.met_at:
            arrived.setdefault(lane.name, time)
            if len(arrived) < len(members):
                return None
            self.met_at[meeting] = max(arrived.values())
            self.ready.extend(name for name in members if name != lane.name)
        return self.met_at[meeting]


def _members(lanes: Iterable[Lane]) -> dict[Meeting, dict[GroupName, int]]:
    """Who takes part in each rendezvous, and where: every lane that has such an instruction."""
    members: dict[Meeting, dict[GroupName, int]] = defaultdict(dict)
    for lane in lanes:
        for index in lane.meets.values():
            meeting = meeting_of(lane, index)
            assert meeting is not None
            members[meeting][lane.name] = index
    return members
