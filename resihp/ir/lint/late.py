"""RHP904: receives that are posted so late that the iteration takes longer for it.

Under `eager` a send holds up its stream while the buffer is full and its receive is not posted.
The plan is played under its transport. A receive is suspected if, when it is posted, a blocked
send of its channel goes on, while the receiver computed something right before the receive. Then
the plan is played again with the receives of that stream before those computes; it is reported if
that is faster. Moving them is safe: it changes the order of no channel.

Under `edge` nobody waits for a receive. Under `pair` and `rank` what stands behind a transfer
stands behind it at both ends of its pair, so a late receive only holds up what comes later anyway:
no plan was found that is faster for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from resihp.ir.diagnostics import Related, Span
from resihp.ir.lanes import EDGES, Lane
from resihp.ir.model import GroupName, Instr
from resihp.ir.timeline import Timeline, play
from resihp.ir.transfers import At, Transfer, transfers_of
from resihp.ir.transport import Transport
from resihp.ir.verify.findings import Findings
from resihp.ir.view import View

__all__ = ["check_late"]

_MOST_PLAYED = 16
"""Streams for which the plan is played again."""
_RECEIVES = frozenset(edge.recv for edge in EDGES)


class _Late(NamedTuple):
    transfer: Transfer
    compute: int
    """Index of the compute that the receive could stand before."""
    waiting: At
    """What goes on as soon as the receive is posted."""


def check_late(
    view: View,
    transport: Transport,
    boundary_bytes: Mapping[GroupName, int],
    findings: Findings,
) -> None:
    """One finding per stream, at its first receive that is late; none for a deadlock."""

    def makespan(lanes: Mapping[GroupName, Lane]) -> float:
        return play(lanes, transport=transport, boundary_bytes=boundary_bytes).makespan

    timeline = play(view.lanes, transport=transport, boundary_bytes=boundary_bytes)
    if timeline.stuck:
        return
    late: dict[int, dict[int, _Late]] = defaultdict(dict)
    """By stream, then by the index of the receive."""
    for found in _suspects(view, timeline):
        transfer = found.transfer
        late[view.lanes[transfer.receiver].stream].setdefault(transfer.recv, found)
    for stream, suspects in islice(late.items(), _MOST_PLAYED):
        ordered = [suspects[position] for position in sorted(suspects)]
        units = makespan(_with_receives_moved(view, stream, ordered))
        if units < timeline.makespan:
            _report(view, transport, ordered, (timeline.makespan, units), findings)


def _report(
    view: View,
    transport: Transport,
    late: Sequence[_Late],
    makespans: tuple[float, float],
    findings: Findings,
) -> None:
    first = late[0]
    (send, recv), waiting = _ends(first.transfer), first.waiting
    lane = view.lanes[recv.name]
    others = f", and {len(late) - 1} more in this stream," if len(late) > 1 else ""
    verb = "are" if others else "is"
    findings.add(
        "RHP904",
        _span(view, recv),
        f"{lane.text(recv.position)}{others} {verb} posted late for transport `{transport}`: the "
        f"iteration takes {makespans[0]:g} units of time, and {makespans[1]:g} if not",
        related=(
            Related(
                f"{view.lanes[send.name].text(send.position)} of {send.name} has waited for it",
                _span(view, send),
            ),
            Related(f"{waiting.name} goes on here only then", _span(view, waiting)),
        ),
        hint=f"post it before {lane.text_of_pair(first.compute)} (line "
        f"{view.line(lane, first.compute)}); that changes the order of nothing that is posted",
        replica=recv.name.replica,
    )


def _span(view: View, at: At) -> Span:
    return view.span(view.lanes[at.name], at.position)


# --- suspects --------------------------------------------------------------------------------


def _suspects(view: View, timeline: Timeline) -> Iterator[_Late]:
    """Each blocked send that goes on when a receive is posted which stands after a compute."""
    transfers = list(transfers_of(view.lanes))
    posted: dict[tuple[GroupName, GroupName, float], list[_Late]] = defaultdict(list)
    """By channel and time."""
    for transfer in transfers:
        send, recv = _ends(transfer)
        compute = _compute_before(view.lanes[recv.name], recv.position)
        time = _start(timeline, recv)
        if compute is not None and _arrival(timeline, send) < time:
            posted[send.name, recv.name, time].append(_Late(transfer, compute, send))
    for transfer in transfers:
        send, recv = _ends(transfer)
        went_on = _start(timeline, send)
        if _arrival(timeline, send) < went_on:
            for late in posted[send.name, recv.name, went_on]:
                yield late._replace(waiting=send)


def _ends(transfer: Transfer) -> tuple[At, At]:
    return At(transfer.sender, transfer.send), At(transfer.receiver, transfer.recv)


def _compute_before(lane: Lane, index: int) -> int | None:
    """The compute before the receive, if only transfers stand between them."""
    for before in range(index - 1, -1, -1):
        if lane.body[before].op.is_compute:
            return lane.head_of(before)
        if not lane.body[before].op.has_micro_batch:
            return None
    return None


def _start(timeline: Timeline, at: At) -> float:
    return timeline.starts[at.name][at.position]


def _arrival(timeline: Timeline, at: At) -> float:
    """When the stream had done all before."""
    return timeline.ends[at.name][at.position - 1] if at.position else 0.0


# --- the plan with receives moved ------------------------------------------------------------


def _with_receives_moved(
    view: View, stream: int, late: Sequence[_Late]
) -> Mapping[GroupName, Lane]:
    plan = view.plan
    body = _moved(plan.streams[stream].body, late)
    streams = (
        *plan.streams[:stream],
        msgspec.structs.replace(plan.streams[stream], body=body),
        *plan.streams[stream + 1 :],
    )
    changed = msgspec.structs.replace(plan, streams=streams)
    return {
        name: Lane(lane.group, stream, changed, view.placement) if lane.stream == stream else lane
        for name, lane in view.lanes.items()
    }


def _moved(body: Sequence[Instr], late: Sequence[_Late]) -> tuple[Instr, ...]:
    """Each late receive, with the receives between, before its compute."""
    moved: dict[int, list[Instr]] = defaultdict(list)
    taken: set[int] = set()
    for found in late:
        for index in range(found.compute, found.transfer.recv + 1):
            if body[index].op in _RECEIVES and index not in taken:
                taken.add(index)
                moved[found.compute].append(body[index])
    after: list[Instr] = []
    for index, instr in enumerate(body):
        after += moved.get(index, ())
        if index not in taken:
            after.append(instr)
    return tuple(after)
