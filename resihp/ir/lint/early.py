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
from resihp.ir.lanes import BY_TRANSFER, Lane
from resihp.ir.model import GroupName
from resihp.ir.verify.findings import Findings
from resihp.ir.view import View

__all__ = ["check_early"]

_MICRO_BATCHES_AHEAD = 2


class _Early(NamedTuple):
    num_computes: int
    """Between the receive and the latest place that it could have."""
    recv: int
    use: int
    latest: int
    """Index before which it could stand."""


def check_early(view: View, findings: Findings) -> None:
    """One finding per stream, at the receive that stands earliest."""
    for lane in view.lanes.values():
        early = _early_receives(lane)
        if not early:
            continue
        worst = max(early, key=lambda found: (found.num_computes, -found.recv))
        more = f" ({len(early)} receives of this stream are early)" if len(early) > 1 else ""
        findings.add(
            "RHP903",
            view.span(lane, worst.recv),
            f"{lane.text(worst.recv)} holds a buffer {worst.num_computes} computes longer than it "
            f"has to{more}",
            related=(
                Related(
                    f"{lane.text(worst.use)} needs the tensor here", view.span(lane, worst.use)
                ),
            ),
            hint=f"move it down, as far as right before {lane.text_of_pair(worst.latest)} (line "
            f"{view.line(lane, worst.latest)})",
            replica=lane.name.replica,
        )


def _early_receives(lane: Lane) -> list[_Early]:
    computed = [0, *accumulate(instr.op.is_compute for instr in lane.body)]
    micro_batches = {task.micro_batch for op, task in lane.first if op.is_compute}
    allowed = _MICRO_BATCHES_AHEAD * computed[-1] / max(len(micro_batches), 1)
    early: list[_Early] = []
    following: dict[GroupName, int] = {}
    """The latest place of the receive that comes next, by channel."""
    for (op, task), recv in reversed(lane.first.items()):
        edge = BY_TRANSFER.get(op)
        if edge is None or op is not edge.recv:
            continue
        use, far_end = lane.use_of(edge, task), lane.far_end(recv)
        assert use is not None, "lint looks at plans without errors"
        assert far_end is not None, "lint looks at plans without errors"
        latest = min(lane.head_of(use), following.get(far_end[0], len(lane.body)))
        following[far_end[0]] = latest
        num_computes = computed[latest] - computed[recv]
        if num_computes > allowed:
            early.append(_Early(num_computes, recv, use, latest))
    return early
