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
from resihp.ir.transfers import At
from resihp.ir.transport import Transport
from resihp.ir.verify.findings import Findings
from resihp.ir.view import Key, View

__all__ = ["check_late"]

_MOST_PLAYED = 16
"""Streams for which the plan is played again."""
_BY_SEND = {edge.send: edge for edge in EDGES}
_RECEIVES = frozenset(edge.recv for edge in EDGES)
_ZERO_COST = frozenset(op for op in Op if op.has_micro_batch and not op.is_compute)


class _Transfer(NamedTuple):
    send: At
    recv: At
    use: At | None


class _Late(NamedTuple):
    transfer: _Transfer
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
        recv = found.transfer.recv
        late[view.lanes[recv.name].stream].setdefault(recv.position, found)
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
    recv, send, waiting = late[0].transfer.recv, late[0].transfer.send, late[0].waiting
    lane = view.lanes[recv.name]
    compute = f"{_text(view, At(recv.name, late[0].compute))} (line {_line(view, lane, late[0])})"
    others = f", and {len(late) - 1} more in this stream," if len(late) > 1 else ""
    verb = "are" if others else "is"
    findings.add(
        "RHP904",
        _span(view, recv),
        f"{_text(view, recv)}{others} {verb} posted late for transport `{transport}`: the "
        f"iteration takes {makespans[0]:g} units of time, and {makespans[1]:g} if not",
        related=(
            Related(f"{_text(view, send)} of {send.name} has waited for it", _span(view, send)),
            Related(f"{waiting.name} goes on here only then", _span(view, waiting)),
        ),
        hint=f"post it before {compute}; that changes the order of nothing that is posted",
        replica=recv.name.replica,
    )


def _line(view: View, lane: Lane, late: _Late) -> int:
    return view.line(lane, late.compute)


def _text(view: View, at: At) -> str:
    lane = view.lanes[at.name]
    return view.text(lane, next(i for i in view.items(lane) if i.position == at.position))


def _span(view: View, at: At) -> Span:
    return view.span(view.lanes[at.name], at.position)


# --- suspects --------------------------------------------------------------------------------


def _transfers(view: View) -> Iterator[_Transfer]:
    at: dict[Key, At] = {}
    for name, lane in view.lanes.items():
        for item in view.items(lane):
            at.setdefault(item.key, At(name, item.position))
    for key, send in at.items():
        edge = _BY_SEND.get(key.op)
        if edge is None:
            continue
        far = key._replace(op=edge.recv, stage=key.stage + edge.stage_step)
        if far in at:
            uses = (at.get(far._replace(op=op)) for op in (edge.gather, *edge.consume))
            use = min((u for u in uses if u is not None), key=lambda u: u.position, default=None)
            yield _Transfer(send, at[far], use)


def _suspects(view: View, timeline: Timeline, transport: Transport) -> Iterator[_Late]:
    """Each wait that ends when a receive is posted which stands right after a compute."""
    transfers = list(_transfers(view))
    posted: dict[float, list[tuple[_Transfer, int]]] = defaultdict(list)
    for transfer in transfers:
        name, index = transfer.recv
        compute = _compute_before(view.lanes[name], index, transport)
        time = _start(timeline, transfer.recv)
        if compute is not None and _arrival(timeline, transfer.send) < time:
            posted[time].append((transfer, compute))
    for transfer in transfers:
        waiting = transfer.send if transport.kind == "eager" else transfer.use
        if waiting is None:
            continue
        ready, went_on = _arrival(timeline, waiting), _start(timeline, waiting)
        if transport.kind != "eager":
            ready = max(ready, *(_start(timeline, end) for end in transfer[:2]))
        if ready < went_on:
            for late, compute in posted.get(went_on, ()):
                if _shares_queue(late, transfer, transport):
                    yield _Late(late, compute, waiting)


def _shares_queue(late: _Transfer, waiting: _Transfer, transport: Transport) -> bool:
    ends, theirs = {late.send.name, late.recv.name}, {waiting.send.name, waiting.recv.name}
    if transport.kind == "rank":
        return bool(ends & theirs)
    return (late.send.name, late.recv.name) == (waiting.send.name, waiting.recv.name)


def _compute_before(lane: Lane, index: int, transport: Transport) -> int | None:
    """The compute before the receive, if nothing of its queue stands between them."""
    passed = _RECEIVES if transport.kind == "rank" else _ZERO_COST
    for before in range(index - 1, -1, -1):
        op = lane.body[before].op
        if op.is_compute:
            return before - 1 if before and lane.body[before - 1].paired else before
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
        name: Lane(lane.group, stream, changed, lane.placement) if lane.stream == stream else lane
        for name, lane in view.lanes.items()
    }


def _moved(body: Sequence[Instr], late: Sequence[_Late]) -> tuple[Instr, ...]:
    """Each late receive, with the receives between, before its compute."""
    moved: dict[int, list[Instr]] = defaultdict(list)
    taken: set[int] = set()
    for found in late:
        for index in range(found.compute, found.transfer.recv.position + 1):
            if body[index].op in _RECEIVES and index not in taken:
                taken.add(index)
                moved[found.compute].append(body[index])
    after: list[Instr] = []
    for index, instr in enumerate(body):
        after += moved.get(index, ())
        if index not in taken:
            after.append(instr)
    return tuple(after)
