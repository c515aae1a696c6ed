"""A scene as a Chrome trace (Trace Event Format, JSON object form), which Perfetto opens.

A process is a replica, a thread a group. Times are microseconds; of a timeline in units of time
one unit is one millisecond. Slices of a thread never overlap unless one contains the other, as
the format demands of complete events: an overlapped pair is a slice that holds both instructions
one after the other, and what runs beside computation has a thread of its own. Perfetto takes
colours from names, chrome://tracing from `cname`; so a name is the operation and the micro-batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from resihp.errors import UserError
from resihp.ir.drawing.hops import Hop, hops_of
from resihp.ir.drawing.scene import Clock, Panel, Row, Scene
from resihp.ir.lanes import Lane, name_of
from resihp.ir.model import GroupName, Op
from resihp.ir.statements import spell_numbers

__all__ = ["MAX_FLOWS", "MAX_SLICES", "Event", "Trace", "trace_of"]

MAX_SLICES = 400_000
MAX_FLOWS = 20_000
_COLOURS = {
    Op.F: "rail_response",
    Op.B: "thread_state_running",
    Op.W: "rail_idle",
    Op.BW: "rail_load",
    Op.STEP: "black",
}
_OTHERS = "grey"
_CLOCK_US = {"s": 1e6, "unit": 1e3}

Argument = str | int | float | list[int]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One trace event; fields as the format names them."""

    name: str
    ph: Literal["X", "s", "f", "C", "M"]
    """Complete, start and finish of a flow, counter, metadata."""
    pid: int
    tid: int = 0
    ts: float | None = None
    dur: float | None = None
    cat: str | None = None
    cname: str | None = None
    id: int | None = None
    bp: Literal["e"] | None = None
    """A flow ends at the slice that encloses its time."""
    args: dict[str, Argument] | None = None


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    traceEvents: list[Event]  # noqa: N815 (the format's name)
    displayTimeUnit: Literal["ms", "ns"] = "ms"  # noqa: N815
    otherData: dict[str, str] = {}  # noqa: N815


class Slice(NamedTuple):
    """A span of a thread in whole nanoseconds."""

    start_ns: int
    end_ns: int
    event: Event


def trace_of(scene: Scene) -> Trace:
    """The trace of all that the scene shows.

    Transfers are arrows between what makes a tensor and what uses it, the first `MAX_FLOWS` of
    them. Raises UserError for more than `MAX_SLICES` instructions.
    """
    count = sum(len(row.boxes) + len(row.marks) for row in scene.rows)
    if count > MAX_SLICES:
        raise UserError(
            f"{count} instructions do not fit into one trace ({MAX_SLICES} do); "
            "`--replicas` chooses fewer"
        )
    names: list[Event] = []
    timed: list[Event] = []
    threads: dict[GroupName, int] = {}
    next_tid = 1
    for panel in scene.panels:
        names += _process(panel)
        for row in panel.rows:
            threads[row.group.name] = next_tid
            tracks = _tracks(row, scene)
            for number, track in enumerate(tracks):
                names += _thread(row, next_tid, number)
                timed += (msgspec.structs.replace(each.event, tid=next_tid) for each in track)
                next_tid += 1
            timed += _memory(row, scene.played.clock)
    timed += _flows(scene, threads)
    # At one time what encloses comes first: arrows are bound to slices that are known already.
    timed.sort(key=lambda event: (event.ts or 0.0, "MXsfC".index(event.ph), -(event.dur or 0.0)))
    plan, clock = scene.played.plan, scene.played.clock
    other = {"plan": plan.model.name, "times": clock.note}
    if clock.unit == "unit":
        other["scale"] = "1 unit of time is shown as 1 ms"
    return Trace(traceEvents=[*names, *timed], otherData=other)


def _pid(replica: int) -> int:
    # Viewers take process 0 for the idle task of the system.
    return replica + 1


def _process(panel: Panel) -> Iterator[Event]:
    pid = _pid(panel.replica)
    alike = sorted(panel.alike)
    name = f"replica{'' if len(alike) == 1 else 's'} {spell_numbers(alike)}"
    yield Event(name="process_name", ph="M", pid=pid, args={"name": name})
    yield Event(name="process_sort_index", ph="M", pid=pid, args={"sort_index": panel.replica})


def _thread(row: Row, tid: int, number: int) -> Iterator[Event]:
    pid = _pid(row.group.replica)
    stages = ", ".join(map(str, row.stages))
    slow = f", {row.speed:.3g}x speed" if row.speed < 1 else ""
    name = (
        f"pp{row.group.pp}: stage{'' if len(row.stages) == 1 else 's'} {stages}, "
        f"ranks {spell_numbers(row.group.ranks)}{slow}"
    )
    if number:
        name = f"pp{row.group.pp}: beside it {number}"
    yield Event(name="thread_name", ph="M", pid=pid, tid=tid, args={"name": name})
    yield Event(name="thread_sort_index", ph="M", pid=pid, tid=tid, args={"sort_index": tid})


def _tracks(row: Row, scene: Scene) -> list[list[Slice]]:
    """Slices on as few threads as keep them apart; the first thread computes."""
    played = scene.played
    lane = played.lanes[row.lane]
    starts, ends = played.timeline.starts[lane.name], played.timeline.ends[lane.name]
    tracks = [_computed(row, lane, starts, ends, played.clock)]
    for mark in row.marks:
        start, end = _ns(mark.start, played.clock), _ns(mark.end, played.clock)
        name = mark.op.mnemonic if mark.stage is None else f"{mark.op.mnemonic} {mark.stage}"
        event = _slice(row, name, mark.op, start, end, {"op": mark.op.mnemonic})
        _place(tracks, Slice(start, end, event))
    return tracks


def _computed(
    row: Row, lane: Lane, starts: list[float], ends: list[float], clock: Clock
) -> list[Slice]:
    found: list[Slice] = []
    for box in row.boxes:
        start, end = _ns(starts[box.at], clock), _ns(ends[box.at], clock)
        name = f"{box.op.mnemonic} {name_of(box.task, row.group.replica)}"
        if box.half == 1:
            pair = lane.text_of_pair(box.at).strip("`")
            whole = _ns(box.start, clock), _ns(box.end, clock)
            found.append(Slice(*whole, _slice(row, pair, None, *whole, {"op": "pair"})))
        arguments: dict[str, Argument] = {
            "op": box.op.mnemonic,
            "micro-batch": box.task.number,
            "home": box.task.home,
            "stage": box.task.stage,
            "ranks": list(row.group.ranks),
            "index": box.at,
        }
        found.append(Slice(start, end, _slice(row, name, box.op, start, end, arguments)))
    return found


def _slice(
    row: Row, name: str, op: Op | None, start: int, end: int, arguments: dict[str, Argument]
) -> Event:
    return Event(
        name=name,
        ph="X",
        pid=_pid(row.group.replica),
        ts=start / 1000,
        dur=(end - start) / 1000,
        cat="pair" if op is None else "compute" if op.is_compute else "gradients",
        cname=_COLOURS.get(op, _OTHERS) if op is not None else _OTHERS,
        args=arguments,
    )


def _place(tracks: list[list[Slice]], new: Slice) -> None:
    """Put it on the first track where nothing else is at its time."""
    for track in tracks:
        at = bisect_left(track, new.start_ns, key=lambda each: each.start_ns)
        before = all(each.end_ns <= new.start_ns for each in track[max(at - 3, 0) : at])
        after = at == len(track) or new.end_ns <= track[at].start_ns
        if before and after:
            track.insert(at, new)
            return
    tracks.append([new])


def _memory(row: Row, clock: Clock) -> Iterator[Event]:
    """A counter per group; of several values at one time the highest and the last."""
    if row.memory is None:
        return
    pid = _pid(row.group.replica)
    name = f"pp{row.group.pp} memory of a rank"
    points: dict[int, list[int]] = {}
    for time, num_bytes in zip(row.memory.times, row.memory.num_bytes, strict=True):
        points.setdefault(_ns(time, clock), []).append(num_bytes)
    for time_ns, values in points.items():
        shown = values[-1:] if max(values) == values[-1] else [max(values), values[-1]]
        for value in shown:
            yield Event(name=name, ph="C", pid=pid, ts=time_ns / 1000, args={"bytes": value})


def _flows(scene: Scene, threads: dict[GroupName, int]) -> Iterator[Event]:
    clock, number = scene.played.clock, 0
    for hop in hops_of(scene):
        if hop.sender not in threads or hop.receiver not in threads:
            continue
        number += 1
        if number > MAX_FLOWS:
            return
        yield _flow_end(hop, number, threads, clock, start=True)
        yield _flow_end(hop, number, threads, clock, start=False)


def _flow_end(
    hop: Hop, number: int, threads: dict[GroupName, int], clock: Clock, *, start: bool
) -> Event:
    """Where an arrow leaves: right before its slice ends, since a slice that has ended is none."""
    name = hop.sender if start else hop.receiver
    made, ended = _ns(hop.made_from, clock), _ns(hop.made, clock)
    time_ns = max(made, ended - 1) if start else _ns(hop.used, clock)
    return Event(
        name=hop.what,
        ph="s" if start else "f",
        pid=_pid(name.replica),
        tid=threads[name],
        ts=time_ns / 1000,
        cat="transfer",
        id=number,
        bp=None if start else "e",
    )


def _ns(time: float, clock: Clock) -> int:
    return round(time * _CLOCK_US[clock.unit] * 1000)
