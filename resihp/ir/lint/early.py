"""RHP903: receives that hold a buffer long before the tensor is used.

The buffer of a receive lives from its line to the use of the tensor. Posted as far ahead as the
compute of one micro-batch, a receive can hide its transfer; as far as two, it hides one that is
late. Beyond that it costs memory and nothing is won. So a receive may stand up to `2 * c`
computes before its use, where `c` is what the group computes for one micro-batch.

Only the order of the channel is a reason to post earlier: receives follow the order of their
sends, so each has to come before those that follow it on its channel. Under transports where the
place of a receive matters to others too (`pair`, `rank`, `eager`) none is reported.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from resihp.ir.diagnostics import Related
from resihp.ir.lanes import EDGES, Lane
from resihp.ir.model import GroupName
from resihp.ir.verify.findings import Findings
from resihp.ir.view import Item, Key, View

__all__ = ["check_early"]

_MICRO_BATCHES_AHEAD = 2
_EDGE_OF = {edge.recv: edge for edge in EDGES}


class _Early(NamedTuple):
    num_computes: int
    """Between the receive and the latest place that it could have."""
    recv: Item
    use: Item
    latest: int
    """Index before which it could stand."""


def check_early(view: View, findings: Findings) -> None:
    """One finding per stream, at the receive that stands earliest."""
    for lane in view.lanes.values():
        early = _early_receives(view, lane)
        if not early:
            continue
        worst = max(early, key=lambda found: (found.num_computes, -found.recv.position))
        more = f" ({len(early)} receives of this stream are early)" if len(early) > 1 else ""
        findings.add(
            "RHP903",
            view.span(lane, worst.recv.position),
            f"{view.text(lane, worst.recv)} holds a buffer {worst.num_computes} computes longer "
            f"than it has to{more}",
            related=(
                Related(
                    f"{view.text(lane, worst.use)} needs the tensor here",
                    view.span(lane, worst.use.position),
                ),
            ),
            hint=f"move it down; line {view.line(lane, worst.latest)} is the first that it has to "
            "come before",
            replica=lane.name.replica,
        )


def _early_receives(view: View, lane: Lane) -> list[_Early]:
    items = list(view.items(lane))
    at: dict[Key, Item] = {}
    for item in items:
        at.setdefault(item.key, item)
    computed = [0, *accumulate(instr.op.is_compute for instr in lane.body)]
    micro_batches = {item.key.micro_batch for item in items if item.key.op.is_compute}
    allowed = _MICRO_BATCHES_AHEAD * computed[-1] / max(len(micro_batches), 1)
    early: list[_Early] = []
    following: dict[GroupName | None, int] = {}
    """The latest place of the receive that comes next, by channel."""
    for recv in reversed(items):
        if recv.key.op not in _EDGE_OF:
            continue
        use = _use_of(at, recv)
        channel = view.far_end(lane, recv)
        latest = min(use.position, following.get(channel, use.position))
        following[channel] = latest
        num_computes = computed[latest] - computed[recv.position]
        if num_computes > allowed:
            early.append(_Early(num_computes, recv, use, latest))
    return early


def _use_of(at: dict[Key, Item], recv: Item) -> Item:
    """The gather, or else the compute, that waits for the tensor."""
    edge = _EDGE_OF[recv.key.op]
    uses = (at.get(recv.key._replace(op=op)) for op in (edge.gather, *edge.consume))
    return min(
        (use for use in uses if use is not None and use.position > recv.position),
        key=lambda use: use.position,
    )
