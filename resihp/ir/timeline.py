"""Earliest start and end of every instruction, and where streams get stuck.

The rules are the ones of the plan language: each stream runs in order; a send never waits; a
receive waits for its send; `reduce_grads` waits for every stream of its stage and `step` for all
streams. A receive whose send does not exist counts as ready: that fault has its own diagnostic.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from resihp.ir.lanes import EDGES, Lane, MicroBatch
from resihp.ir.model import GroupName, Op

__all__ = ["UNIT_COST", "Meeting", "Message", "Timeline", "meeting_of", "message_of", "play"]

UNIT_COST: Mapping[Op, float] = {Op.F: 1.0, Op.B: 1.0, Op.W: 1.0, Op.BW: 2.0}
"""Cost of each operation in a picture without measurements; others cost nothing."""

_SENDER_STEP = {edge.recv: -edge.stage_step for edge in EDGES}
_SEND_OF = {edge.recv: edge.send for edge in EDGES}
_SENDS = frozenset(_SEND_OF.values())


class Message(NamedTuple):
    """One posted tensor: which lane sends it, with which operation, of which micro-batch."""

    sender: GroupName
    op: Op
    micro_batch: MicroBatch


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


def message_of(lane: Lane, index: int) -> Message | None:
    """What instruction `index` sends or receives; None for other instructions."""
    op, micro_batch = lane.body[index].op, lane.micro_batches[index]
    if micro_batch is None:
        return None
    if op in _SENDS:
        return Message(lane.name, op, micro_batch)
    if op in _SEND_OF:
        replica, stage = lane.name
        sender = GroupName(replica, stage + _SENDER_STEP[op])
        return Message(sender, _SEND_OF[op], micro_batch)
    return None


def meeting_of(lane: Lane, index: int) -> Meeting | None:
    """The rendezvous that instruction `index` takes part in."""
    op = lane.body[index].op
    if op is Op.REDUCE_GRADS:
        return Meeting(op, lane.name.stage)
    return Meeting(op, -1) if op is Op.STEP else None


def play(lanes: Mapping[GroupName, Lane], cost: Mapping[Op, float] = UNIT_COST) -> Timeline:
    """Run all lanes as early as the rules allow. O(number of instructions)."""
    return _Player(lanes, cost).run()


class _Player:
    def __init__(self, lanes: Mapping[GroupName, Lane], cost: Mapping[Op, float]) -> None:
        self.lanes = lanes
        self.cost = [cost.get(op, 0.0) for op in Op]
        self.starts: dict[GroupName, list[float]] = {name: [] for name in lanes}
        self.ends: dict[GroupName, list[float]] = {name: [] for name in lanes}
        self.posted: dict[Message, float] = {}
        self.waiting: dict[Message, list[GroupName]] = defaultdict(list)
        self.members = _members(lanes.values())
        self.arrived: dict[Meeting, dict[GroupName, float]] = defaultdict(dict)
        self.met_at: dict[Meeting, float] = {}
        self.ready: deque[GroupName] = deque(lanes)

    def run(self) -> Timeline:
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
        while len(ends) < len(lane.body):
            index = len(ends)
            op = lane.body[index].op
            start = ends[-1] if ends else 0.0
            if op in _SEND_OF:
                sent = self._sent(lane, index)
                if sent is None:
                    return
                start = max(start, sent)
            elif op in _SENDS:
                self._post(message_of(lane, index), start)
            elif op >= Op.REDUCE_GRADS:
                met = self._meet(lane, index, start)
                if met is None:
                    return
                start = max(start, met)
            starts.append(start)
            ends.append(start + self.cost[op])

    def _sent(self, lane: Lane, index: int) -> float | None:
        """When the message was posted; None, and `lane` waits for it, if it was not yet."""
        message = message_of(lane, index)
        if message is None or message in self.posted:
            return 0.0 if message is None else self.posted[message]
        sender = self.lanes.get(message.sender)
        if sender is None or (message.op, message.micro_batch) not in sender.first:
            return 0.0
        self.waiting[message].append(lane.name)
        return None

    def _post(self, message: Message | None, time: float) -> None:
        if message is not None and message not in self.posted:
            self.posted[message] = time
            self.ready.extend(self.waiting.pop(message, ()))

    def _meet(self, lane: Lane, index: int, time: float) -> float | None:
        """When everybody had come; None while somebody is missing. The last one wakes all."""
        meeting = _meeting(lane, index)
        arrived, members = self.arrived[meeting], self.members[meeting]
        if meeting not in self.met_at:
            arrived.setdefault(lane.name, time)
            if len(arrived) < len(members):
                return None
            self.met_at[meeting] = max(arrived.values())
            self.ready.extend(name for name in members if name != lane.name)
        return self.met_at[meeting]


def _meeting(lane: Lane, index: int) -> Meeting:
    meeting = meeting_of(lane, index)
    assert meeting is not None
    return meeting


def _members(lanes: Iterable[Lane]) -> dict[Meeting, list[GroupName]]:
    """Who takes part in each rendezvous: every lane that has such an instruction."""
    members: dict[Meeting, list[GroupName]] = defaultdict(list)
    for lane in lanes:
        for index in lane.meets.values():
            members[_meeting(lane, index)].append(lane.name)
    return members
