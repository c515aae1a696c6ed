"""A plan as a picture: one row per TP group and stage, time from left to right, unit costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from resihp.ir.lanes import Lane, Task, lanes_of
from resihp.ir.model import GroupName, Op, Plan
from resihp.ir.placement import Placement, placement_of
from resihp.ir.playback import play_back
from resihp.ir.statements import spell_numbers
from resihp.ir.timeline import UNIT_COST, Timeline

__all__ = ["DEFAULT_WIDTH", "draw"]

DEFAULT_WIDTH = 100
_LETTERS = {Op.F: "F", Op.B: "B", Op.W: "W", Op.BW: "X"}
_FOREIGN = "'"
_IDLE = "."
_PAIRED = "&"
_MARGIN = len("  idle  ")


class _Row(NamedTuple):
    name: str
    """Of the group; empty where the row is that of another of its stages."""
    stage: str
    """As it is written in a plan; empty for the only one of a group."""
    cells: tuple[str, ...]
    idle: str
    """Share of the whole time in which the group computes nothing."""


def draw(
    plan: Plan,
    *,
    width: int = DEFAULT_WIDTH,
    replicas: Collection[int] | None = None,
    has_idle: bool = True,
) -> str:
    """The picture as text, broken into bands of time that fit `width` columns.

    F, B and W take one unit of time each, BW two, transfers none; waits are those of the plan's
    transport. A group that runs several
    stages has a row for each, blank while it runs another one. Groups of replicas that do the same
    at the same time are drawn once. `replicas` limits the rows to those of some. `has_idle` has
    the share of idle units beside each row.
    """
    lanes = lanes_of(plan)
    timeline = play_back(plan, lanes)
    length = max((int(ends[-1]) for ends in timeline.ends.values() if ends), default=0)
    shown = {
        name: lane for name, lane in lanes.items() if replicas is None or name.replica in replicas
    }
    rows = _merge(plan, shown, timeline, length)
    cell = 1 + max((len(cell) for row in rows for cell in row.cells), default=2)
    name = max((len(row.name) for row in rows), default=0)
    rows = [row._replace(name=f"{row.name:<{name}}{row.stage}") for row in rows]
    if not has_idle:
        rows = [row._replace(idle="") for row in rows]
    label = max((len(row.name) for row in rows), default=0)
    per_band = max(1, (width - label - _MARGIN) // cell)
    parts = [_title(plan, timeline)]
    for start in range(0, length, per_band):
        parts.append(_band(rows, range(start, min(start + per_band, length)), cell, label))
    parts.append(_legend(plan, lanes))
    if timeline.stuck:
        parts.append(_stuck(timeline, lanes))
    return "\n".join(parts)


def _title(plan: Plan, timeline: Timeline) -> str:
    mesh, batch = plan.mesh, plan.batch
    order = f", order {plan.schedule}" if plan.schedule else ""
    ranks = len(plan.active_ranks)
    return (
        f"{plan.model.name}: tp={mesh.tp} pp={mesh.pp} dp={mesh.dp}, "
        f"{batch.microbatches} micro-batch{'' if batch.microbatches == 1 else 'es'} per replica"
        f"{order}; {ranks} of {mesh.world} ranks "
        f"compute; {timeline.makespan:g} units of time\n"
    )


_Tracks = tuple[tuple[str, ...], ...]
"""Cells of each stage of a group."""


def _merge(
    plan: Plan, lanes: Mapping[GroupName, Lane], timeline: Timeline, length: int
) -> list[_Row]:
    """Rows of each distinct (position, TP degree, cells), named after all that share them."""
    placement = placement_of(plan)
    found: dict[tuple[int, int, _Tracks], list[int]] = {}
    for name, lane in lanes.items():
        tracks = _tracks(lane, timeline, length, plan, placement)
        found.setdefault((name.pp, lane.group.tp, tracks), []).append(name.replica)
    rows: list[_Row] = []
    for (pp, tp, tracks), replicas in sorted(found.items(), key=lambda item: _order(*item)):
        idle = sum(cell == _IDLE for cell in tracks[0]) / length if length else 0.0
        degree = "" if tp == plan.mesh.tp else f" tp={tp}"
        names = [f"dp{spell_numbers(replicas)}.pp{pp}{degree}", *[""] * (len(tracks) - 1)]
        stages = [f" [{stage}]" for stage in placement.stages[pp]] if len(tracks) > 1 else [""]
        for number, name in enumerate(names):
            share = "" if number else f"{idle:.0%}"
            rows.append(_Row(name, stages[number], tracks[number], share))
    return rows


def _order(key: tuple[int, int, _Tracks], replicas: list[int]) -> tuple[int, int]:
    return replicas[0], key[0]


def _tracks(
    lane: Lane, timeline: Timeline, length: int, plan: Plan, placement: Placement
) -> _Tracks:
    """What runs in each unit of time, stage by stage; idle units are so on all of them."""
    held = placement.stages[lane.name.pp]
    digits = len(str(plan.batch.microbatches - 1))
    tracks = {stage: [""] * length for stage in held}
    for index, end in enumerate(timeline.ends[lane.name]):
        task = lane.tasks[index]
        letter = _LETTERS.get(lane.body[index].op)
        if letter is not None and task is not None:
            cell = _cell(letter, task, lane.name.replica, digits)
            if index in lane.pairs:
                cell += _PAIRED
            for unit in range(int(timeline.starts[lane.name][index]), int(end)):
                tracks[task.stage][unit] = cell
    for unit in range(length):
        if not any(track[unit] for track in tracks.values()):
            for track in tracks.values():
                track[unit] = _IDLE
    return tuple(tuple(tracks[stage]) for stage in held)


def _cell(letter: str, task: Task, replica: int, digits: int) -> str:
    foreign = "" if task.home == replica else f"{_FOREIGN}{task.home}"
    return f"{letter}{task.number:0{digits}d}{foreign}"


def _band(rows: list[_Row], units: range, cell: int, label: int) -> str:
    """Some columns of all rows, under a ruler that counts in fives."""
    marks = (f"{unit:<{cell}}" if unit % 5 == 0 else " " * cell for unit in units)
    idle = max((len(row.idle) for row in rows), default=0)
    heading = "  idle" if idle else ""
    lines = [f"{'':<{label}}{heading}  {''.join(marks)}".rstrip()]
    for row in rows:
        cells = "".join(f"{row.cells[unit]:<{cell}}" for unit in units)
        share = f"  {row.idle:>4}" if idle else ""
        lines.append(f"{row.name:<{label}}{share}  {cells}".rstrip())
    return "\n".join(lines) + "\n"


def _legend(plan: Plan, lanes: Mapping[GroupName, Lane]) -> str:
    used = {instr.op for lane in lanes.values() for instr in lane.body}
    meanings = {
        Op.F: "F forward",
        Op.B: "B activation gradient",
        Op.W: "W weight gradient",
        Op.BW: "X both gradients (BW)",
    }
    words = [text for op, text in meanings.items() if op in used]
    words.append(f"{_IDLE} idle")
    if any(lane.pairs for lane in lanes.values()):
        words.append(f"F3{_PAIRED} overlapped with what follows")
    homes = [
        (task.home, name.replica)
        for name, lane in lanes.items()
        for task in lane.tasks
        if task is not None
    ]
    if any(home != replica for home, replica in homes):
        words.append(f"F3{_FOREIGN}1 micro-batch 3 of replica 1")
    lines = ["   ".join(words)]
    units = ", ".join(f"{op.mnemonic} {cost:g}" for op, cost in UNIT_COST.items() if op in used)
    under = f", but for waits of transport `{plan.transport}`" if plan.transport else ""
    lines.append(f"units of time: {units}; transfers 0{under}")
    if any(len(group.layers) > 1 for group in plan.groups):
        lines.append("[N]: stage N of the model; blank while the group runs another of its stages")
    if any(group.tp != plan.mesh.tp for group in plan.groups):
        lines.append(f"tp=N: a TP degree other than the mesh's {plan.mesh.tp}")
    if plan.standby:
        lines.append(f"standby: {spell_numbers(plan.standby)}")
    if plan.lost:
        lines.append(f"lost: {spell_numbers(plan.lost)}")
    return "\n".join(lines) + "\n"


def _stuck(timeline: Timeline, lanes: Mapping[GroupName, Lane]) -> str:
    """Where the picture stops because streams wait for ever."""
    waits = [
        f"{name} at `{lanes[name].body[index].op.mnemonic}`"
        for name, index in timeline.stuck.items()
    ]
    shown = ", ".join(waits[:4]) + (f" and {len(waits) - 4} more" if len(waits) > 4 else "")
    return f"deadlock: {shown} wait for ever; `resihp verify` names the circle\n"
