"""The tensors that pass from stage to stage, with every instruction that has to do with each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from resihp.ir.lanes import EDGES, Edge, Lane, Task
from resihp.ir.model import Op
from resihp.ir.verify.once import Work

__all__ = ["Crossing", "crossings_of"]


class Crossing(NamedTuple):
    """One tensor on its way; indices are None where the instruction is missing."""

    edge: Edge
    made: Task
    """What makes the tensor."""
    used: Task
    """What uses it."""
    sender: Lane
    receiver: Lane
    produce: int
    scatter: int | None
    send: int | None
    recv: int | None
    gather: int | None
    consume: int

    @property
    def stays(self) -> bool:
        """Whether it is used by the group that makes it: handed over in place."""
        return self.sender is self.receiver


def crossings_of(work: Work) -> Iterator[Crossing]:
    """All tensors between tasks that are computed as they should be."""
    for task, ops in work.places.items():
        following = task.at(task.stage + 1)
        there = work.places.get(following)
        if there is None or task in work.broken or following in work.broken:
            continue
        ends = (task, ops[Op.F].lane), (following, there[Op.F].lane)
        for edge in EDGES:
            (made, sender), (used, receiver) = ends if edge.stage_step > 0 else ends[::-1]
            produce = sender.find(edge.produce, made)
            consume = receiver.find(edge.consume, used)
            assert produce is not None, f"{made} is not broken"
            assert consume is not None, f"{used} is not broken"
            yield Crossing(
                edge,
                made,
                used,
                sender,
                receiver,
                produce,
                sender.first.get((edge.scatter, made)),
                sender.first.get((edge.send, made)),
                receiver.first.get((edge.recv, used)),
                receiver.first.get((edge.gather, used)),
                consume,
            )
