"""RHP904: receives that are posted so late that the iteration takes longer for it.

Under `rank` and `eager` what is posted may wait for a receive of something else. The plan is
played under its transport. A receive is suspected if, at the time it is posted, a stream goes on
that waited only for that, while the receiver computed something that stands right before the
receive. Then the plan is played again with the receives of that stream before those computes; it
is reported if that is faster. Moving them is safe: the order of what is posted stays the same.
(Under `pair` what is behind a transfer is behind it at both ends, so a late receive holds up
nothing that was ready.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from resihp.ir.diagnostics import Related, Span
from resihp.ir.lanes import EDGES, Lane
from resihp.ir.model import GroupName, Instr, Op
from resihp.ir.timeline import Timeline, play
from resihp.ir.transfers import At, Transfer, transfers_of
from resihp.ir.transport import Transport
from resihp.ir.verify.findings import Findings
from resihp.ir.view import View

__all__ = ["check_late"]

_MOST_PLAYED = 16
"""Streams for which the plan is played again."""
_RECEIVES = frozenset(edge.recv for edge in EDGES)
_ZERO_COST = frozenset(op for op in Op if op.has_micro_batch and not op.is_compute)


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
    for found in _suspects(view, timeline, transport):
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


def _suspects(view: View, timeline: Timeline, transport: Transport) -> Iterator[_Late]:
    """Each wait that ends when a receive is posted which stands right after a compute."""
    transfers = list(transfers_of(view.lanes))
    posted: dict[float, list[tuple[Transfer, int]]] = defaultdict(list)
    for transfer in transfers:
        send, recv = _ends(transfer)
        compute = _compute_before(view.lanes[recv.name], recv.position, transport)
        if compute is not None and _arrival(timeline, send) < _start(timeline, recv):
            posted[_start(timeline, recv)].append((transfer, compute))
    for transfer in transfers:
        waiting = _waiting(view, transfer, transport)
        if waiting is None:
            continue
        ready, went_on = _arrival(timeline, waiting), _start(timeline, waiting)
        if transport.kind != "eager":
            ready = max(ready, *(_start(timeline, end) for end in _ends(transfer)))
        if ready < went_on:
            for late, compute in posted.get(went_on, ()):
                if _shares_queue(late, transfer, transport):
                    yield _Late(late, compute, waiting)


def _ends(transfer: Transfer) -> tuple[At, At]:
    return At(transfer.sender, transfer.send), At(transfer.receiver, transfer.recv)


def _waiting(view: View, transfer: Transfer, transport: Transport) -> At | None:
    """What may have to wait for the transfer."""
    if transport.kind == "eager":
        return At(transfer.sender, transfer.send)
    if transfer.use is None:
        return None
    return At(transfer.receiver, view.lanes[transfer.receiver].head_of(transfer.use))


def _shares_queue(late: Transfer, waiting: Transfer, transport: Transport) -> bool:
    ends, theirs = (late.sender, late.receiver), (waiting.sender, waiting.receiver)
    return ends == theirs or (transport.kind == "rank" and not {*ends}.isdisjoint(theirs))


def _compute_before(lane: Lane, index: int, transport: Transport) -> int | None:
    """The compute before the receive, if nothing of its queue stands between them."""
    passed = _RECEIVES if transport.kind == "rank" else _ZERO_COST
    for before in range(index - 1, -1, -1):
        op = lane.body[before].op
        if op.is_compute:
            return lane.head_of(before)
        if op not in passed:
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
