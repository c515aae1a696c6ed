"""RHP906: tensors that are cut into a single chunk.

Between equal TP degrees above 1 a cut is a choice, since each member then sends only its share.
With one rank at both ends there is one chunk: the cut and the join do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from resihp.ir.lanes import BY_TRANSFER, Lane
from resihp.ir.model import GroupName
from resihp.ir.verify.findings import Findings
from resihp.ir.view import View

__all__ = ["check_cuts"]


def check_cuts(view: View, findings: Findings) -> None:
    """One finding per stream that scatters to groups of one rank from a group of one rank."""
    degrees = {group.name: group.tp for group in view.plan.groups}
    for lane in view.lanes.values():
        needless = [index for index in _scatters(lane, degrees) if lane.group.tp == 1]
        if needless:
            first = needless[0]
            more = f" (as {len(needless) - 1} more in this stream)" if len(needless) > 1 else ""
            findings.add(
                "RHP906",
                view.span(lane, first),
                f"{lane.text(first)} cuts into one chunk{more}: both groups have one rank",
                hint="leave out the scatter, and the gather at the other end",
                replica=lane.name.replica,
            )


def _scatters(lane: Lane, degrees: Mapping[GroupName, int]) -> Iterator[int]:
    """Scatters of tensors that go to a group of one rank."""
    for (op, task), index in lane.first.items():
        edge = BY_TRANSFER.get(op)
        if edge is not None and op is edge.scatter:
            send = lane.first.get((edge.send, task))
            far_end = None if send is None else lane.far_end(send)
            if far_end is not None and degrees.get(far_end[0]) == 1:
                yield index
