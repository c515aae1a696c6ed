"""RHP906: tensors that are cut into a single chunk.

Between equal TP degrees above 1 a cut is a choice, since each member then sends only its share.
With one rank at both ends there is one chunk: the cut and the join do nothing.
"""

from __future__ import annotations

from resihp.ir.lanes import EDGES
from resihp.ir.model import GroupName
from resihp.ir.verify.findings import Findings
from resihp.ir.view import Item, View

__all__ = ["check_cuts"]


def check_cuts(view: View, findings: Findings) -> None:
    """One finding per stream that scatters to groups of one rank from a group of one rank."""
    degrees: dict[GroupName | None, int] = {g.name: g.tp for g in view.plan.groups}
    sends = {edge.scatter: edge.send for edge in EDGES}
    for lane in view.lanes.values():
        if lane.group.tp > 1:
            continue
        items = list(view.items(lane))
        cut = {
            item.key._replace(op=sends[item.key.op]): item for item in items if item.key.op in sends
        }
        needless: list[Item] = [
            cut[item.key]
            for item in items
            if item.key in cut and degrees.get(view.far_end(lane, item)) == 1
        ]
        if needless:
            first = needless[0]
            more = f" (as {len(needless) - 1} more in this stream)" if len(needless) > 1 else ""
            findings.add(
                "RHP906",
                view.span(lane, first.position),
                f"{view.text(lane, first)} cuts into one chunk{more}: both groups have one rank",
                hint="leave out the scatter, and the gather at the other end",
                replica=lane.name.replica,
            )
