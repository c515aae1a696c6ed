"""Overlapped pairs: two computations that can run at the same time."""

from __future__ import annotations

from collections.abc import Mapping

from resihp.ir.lanes import EDGES, Lane, Task
from resihp.ir.model import GroupName
from resihp.ir.verify.report import Report

__all__ = ["check_pairs"]


def check_pairs(lanes: Mapping[GroupName, Lane], report: Report) -> None:
    """RHP110."""
    for lane in lanes.values():
        for index in lane.paired:
            why = _why_not(lane, index)
            if why is not None:
                message = f"{lane.text(index)} cannot be overlapped with what follows: {why}"
                report.add("RHP110", lane, index, message)


def _why_not(lane: Lane, index: int) -> str | None:
    """Why instruction `index` and the next cannot be a pair; None if they can."""
    if index + 1 == len(lane.body):
        return "nothing follows it"
    for at in (index, index + 1):
        if not lane.body[at].op.is_compute:
            return f"{lane.text(at)} does not compute"
    if index - 1 in lane.pairs:
        return "it is overlapped with what stands before it, and a pair has two instructions"
    first, second = lane.tasks[index : index + 2]
    if first is None or second is None:
        return None
    if first == second:
        return "both work on the same micro-batch at the same stage"
    needed = _needed(lane, index, first, index + 1, second)
    return needed or _needed(lane, index + 1, second, index, first)


def _needed(lane: Lane, maker: int, made: Task, user: int, used: Task) -> str | None:
    """What `user` needs of `maker`, if anything."""
    for edge in EDGES:
        ops = lane.body[maker].op in edge.produce, lane.body[user].op in edge.consume
        if all(ops) and used == made.at(made.stage + edge.stage_step):
            return f"{lane.text(user)} needs the {edge.what} that {lane.text(maker)} makes"
    return None
