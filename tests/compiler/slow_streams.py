"""When an iteration of the executor ends, worked out by recursion: the oracle of emulation.

What the simulator plays in one lane per group the executor runs on two streams. Compute goes on
beside gathers and reductions, and a tensor leaves when it is made, even if the stream has not come
to its send. So an iteration of the executor is never longer than that of the simulator.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache

from resihp.ir.lanes import EDGES, Lane, lanes_of
from resihp.ir.model import GroupName, Op, Plan
from resihp.ir.transfers import Transfer, transfers_of

_RECEIVES = (Op.RECV_ACT, Op.RECV_GRAD)
_GATHERS = (Op.GATHER_ACT, Op.GATHER_GRAD)


def slow_streams(plan: Plan, seconds: Mapping[GroupName, Sequence[float]]) -> float:
    """Seconds until the last instruction ends."""
    sys.setrecursionlimit(100_000)
    return _Streams(plan, seconds).end()


class _Streams:
    def __init__(self, plan: Plan, seconds: Mapping[GroupName, Sequence[float]]) -> None:
        self.lanes = lanes_of(plan)
        self.seconds = seconds
        self.arriving: dict[tuple[GroupName, int], Transfer] = {
            (transfer.receiver, transfer.recv): transfer for transfer in transfers_of(self.lanes)
        }
        self.compute_end = cache(self._compute_end)
        self.comm_end = cache(self._comm_end)

    def end(self) -> float:
        """`step` begins when the last instruction of all has ended."""
        begin = max(
            max(self._compute_before(name, len(lane.body)), self._comm_before(name, len(lane.body)))
            for name, lane in self.lanes.items()
        )
        return begin + max(self.seconds[name][-1] for name in self.lanes)

    def _compute_before(self, name: GroupName, index: int) -> float:
        """When the compute stream has ended everything before instruction `index`."""
        for at in range(index - 1, -1, -1):
            if self.lanes[name].body[at].op.is_compute:
                return self.compute_end(name, at)
        return 0.0

    def _comm_before(self, name: GroupName, index: int) -> float:
        for at in range(index - 1, -1, -1):
            if self._is_comm(self.lanes[name], at):
                return self.comm_end(name, at)
        return 0.0

    def _is_comm(self, lane: Lane, index: int) -> bool:
        """A reduction, or a gather of more than one chunk: one is the whole tensor."""
        op, task = lane.body[index].op, lane.tasks[index]
        if op not in _GATHERS:
            return op is Op.REDUCE_GRADS
        assert task is not None
        transfer = self.arriving[lane.name, lane.first[_RECEIVES[_GATHERS.index(op)], task]]
        return max(lane.group.tp, self.lanes[transfer.sender].group.tp) > 1

    def _compute_end(self, name: GroupName, index: int) -> float:
        """Of a compute instruction; of a pair both end together."""
        lane = self.lanes[name]
        head = lane.head_of(index)
        members = (head, head + 1) if head in lane.pairs else (head,)
        start = self._compute_before(name, head)
        for at in members:
            start = max(start, self._input(lane, at))
        return start + sum(self.seconds[name][at] for at in members)

    def _input(self, lane: Lane, index: int) -> float:
        """When the tensor is there that a compute instruction uses."""
        task, op = lane.tasks[index], lane.body[index].op
        assert task is not None
        for edge in EDGES:
            if op not in edge.consume:
                continue
            recv = lane.first.get((edge.recv, task))
            if recv is not None:
                gather = lane.first.get((edge.gather, task))
                arrival = self._arrival(lane.name, recv)
                if gather is None or not self._is_comm(lane, gather):
                    return arrival
                return self.comm_end(lane.name, gather)
            made = lane.find(edge.produce, task.at(task.stage - edge.stage_step))
            return 0.0 if made is None else self.compute_end(lane.name, made)
        return 0.0

    def _arrival(self, name: GroupName, recv: int) -> float:
        transfer = self.arriving[name, recv]
        sender = self.lanes[transfer.sender]
        task = sender.tasks[transfer.send]
        assert task is not None
        edge = next(edge for edge in EDGES if edge.send is sender.body[transfer.send].op)
        made = sender.find(edge.produce, task)
        assert made is not None
        left = self.compute_end(transfer.sender, made)
        return left + self.seconds[transfer.sender][transfer.send]

    def _comm_end(self, name: GroupName, index: int) -> float:
        """Of a gather or a reduction."""
        lane = self.lanes[name]
        op, task = lane.body[index].op, lane.tasks[index]
        if op in _GATHERS:
            assert task is not None
            recv = lane.first[_RECEIVES[_GATHERS.index(op)], task]
            return max(self._comm_before(name, index), self._arrival(name, recv))
        meeting = lane.meeting(index)
        assert meeting is not None
        coming = [
            (other, lane.meets[meeting])
            for other, lane in self.lanes.items()
            if meeting in lane.meets
        ]
        start = max(
            max(self._comm_before(other, at), self._weights(other, at, meeting.stage))
            for other, at in coming
        )
        return start + max(self.seconds[other][at] for other, at in coming)

    def _weights(self, name: GroupName, index: int, stage: int) -> float:
        """When the last weight gradient of a stage before instruction `index` is there."""
        lane = self.lanes[name]
        for at in range(index - 1, -1, -1):
            task = lane.tasks[at]
            if lane.body[at].op in (Op.W, Op.BW) and task is not None and task.stage == stage:
                return self.compute_end(name, at)
        return 0.0
