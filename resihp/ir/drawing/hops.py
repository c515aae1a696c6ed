"""What goes from group to group, from the instruction that makes it to the one that uses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from resihp.ir.drawing.scene import Scene
from resihp.ir.lanes import BY_TRANSFER, EDGES, Edge, Lane
from resihp.ir.model import GroupName, Level
from resihp.ir.transfers import Transfer, handovers_of, transfers_of

__all__ = ["Hop", "hops_of"]


class Hop(NamedTuple):
    """One tensor on its way."""

    what: str
    """`activation` or `gradient`."""
    sender: GroupName
    made_from: float
    made: float
    """When the compute that makes it started and ended."""
    receiver: GroupName
    used: float
    """When the compute that uses it starts."""


def hops_of(scene: Scene) -> Iterator[Hop]:
    """Everything that is both made and used in the timeline, between groups that are shown.

    Groups have the names under which they are shown.
    """
    played = scene.played
    lanes, timeline = played.lanes, played.timeline
    shown: dict[GroupName, list[GroupName]] = {}
    for row in scene.rows:
        shown.setdefault(row.lane, []).append(row.group.name)
    is_schedule = played.plan.level is Level.SCHEDULE
    for transfer in handovers_of(lanes) if is_schedule else transfers_of(lanes):
        sender, receiver = lanes[transfer.sender], lanes[transfer.receiver]
        ends = _ends_of(transfer, sender, receiver)
        if ends is None:
            continue
        edge, made, used = ends
        starts = timeline.starts[receiver.name]
        if used >= len(starts) or made >= len(timeline.ends[sender.name]):
            continue
        for names in _pairs(shown, sender.name, receiver.name):
            yield Hop(
                edge.what,
                names[0],
                timeline.starts[sender.name][made],
                timeline.ends[sender.name][made],
                names[1],
                starts[used],
            )


def _pairs(
    shown: Mapping[GroupName, list[GroupName]], sender: GroupName, receiver: GroupName
) -> Iterator[tuple[GroupName, GroupName]]:
    """The shown groups that stand for both; in one replica where both are of one."""
    for one in shown.get(sender, ()):
        for other in shown.get(receiver, ()):
            if sender.replica != receiver.replica or one.replica == other.replica:
                yield one, other


def _ends_of(transfer: Transfer, sender: Lane, receiver: Lane) -> tuple[Edge, int, int] | None:
    """The edge, the compute that makes the tensor and the one that uses it."""
    task = sender.tasks[transfer.send]
    op = sender.body[transfer.send].op
    edge = next((e for e in EDGES if op in e.produce), None) or BY_TRANSFER.get(op)
    if task is None or edge is None:
        return None
    made = sender.find(edge.produce, task)
    used = receiver.find(edge.consume, task.at(task.stage + edge.stage_step))
    return None if made is None or used is None else (edge, made, used)
