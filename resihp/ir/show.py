"""A plan as a picture: one row per (replica, stage), time from left to right, unit costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from resihp.ir.lanes import Lane, MicroBatch, lanes_of
from resihp.ir.model import GroupName, Op, Plan
from resihp.ir.statements import spell_numbers
from resihp.ir.timeline import UNIT_COST, Timeline, play

__all__ = ["DEFAULT_WIDTH", "draw"]

DEFAULT_WIDTH = 100
_LETTERS = {Op.F: "F", Op.B: "B", Op.W: "W", Op.BW: "X"}
_FOREIGN = "'"
_MARGIN = len("  idle  ")


class _Row(NamedTuple):
    name: str
    cells: list[str]
    idle: float
    """Share of the whole time in which the row computes nothing."""


def draw(plan: Plan, *, width: int = DEFAULT_WIDTH) -> str:
    """The picture as text, broken into bands of time that fit `width` columns.

    F, B and W take one unit of time each, BW two, transfers none. Rows of replicas that do the
    same at the same time are drawn once.
    """
    lanes = lanes_of(plan)
    timeline = play(lanes)
    length = max((int(ends[-1]) for ends in timeline.ends.values() if ends), default=0)
    rows = _merge(plan, lanes, timeline, length)
    cell = 1 + max((len(cell) for row in rows for cell in row.cells), default=2)
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
    schedule = f", schedule {plan.schedule}" if plan.schedule else ""
    ranks = len(plan.active_ranks)
    return (
        f"{plan.model.name}: tp={mesh.tp} pp={mesh.pp} dp={mesh.dp}, "
        f"{batch.microbatches} micro-batches per replica{schedule}; {ranks} of {mesh.world} ranks "
        f"compute; {timeline.makespan:g} units of time\n"
    )


def _merge(
    plan: Plan, lanes: Mapping[GroupName, Lane], timeline: Timeline, length: int
) -> list[_Row]:
    """One row per distinct (stage, TP degree, cells), named after all replicas that share it."""
    found: dict[tuple[int, int, tuple[str, ...]], list[int]] = {}
    for name, lane in lanes.items():
        cells = tuple(_cells(lane, timeline, length, plan))
        found.setdefault((name.pp, lane.group.tp, cells), []).append(name.replica)
    rows: list[_Row] = []
    for (stage, tp, cells), replicas in sorted(found.items(), key=lambda item: _order(*item)):
        busy = sum(cell != "." for cell in cells)
        degree = "" if tp == plan.mesh.tp else f" tp={tp}"
        name = f"dp{spell_numbers(replicas)}.pp{stage}{degree}"
        rows.append(_Row(name, list(cells), 1 - busy / length if length else 0.0))
    return rows


def _order(key: tuple[int, int, tuple[str, ...]], replicas: list[int]) -> tuple[int, int]:
    return replicas[0], key[0]


def _cells(lane: Lane, timeline: Timeline, length: int, plan: Plan) -> Iterator[str]:
    cells = ["."] * length
    digits = len(str(plan.batch.microbatches - 1))
    starts, ends = timeline.starts[lane.name], timeline.ends[lane.name]
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        micro_batch = lane.micro_batches[index]
        letter = _LETTERS.get(lane.body[index].op)
        if letter is not None and micro_batch is not None:
            for unit in range(int(start), int(end)):
                cells[unit] = _cell(letter, micro_batch, lane.name.replica, digits)
    yield from cells


def _cell(letter: str, micro_batch: MicroBatch, replica: int, digits: int) -> str:
    foreign = "" if micro_batch.home == replica else f"{_FOREIGN}{micro_batch.home}"
    return f"{letter}{micro_batch.number:0{digits}d}{foreign}"


def _band(rows: list[_Row], units: range, cell: int, label: int) -> str:
    """Some columns of all rows, under a ruler that counts in fives."""
    marks = (f"{unit:<{cell}}" if unit % 5 == 0 else " " * cell for unit in units)
    lines = [f"{'':<{label}}  idle  {''.join(marks)}".rstrip()]
    for row in rows:
        cells = "".join(f"{row.cells[unit]:<{cell}}" for unit in units)
        lines.append(f"{row.name:<{label}}  {row.idle:4.0%}  {cells}".rstrip())
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
    words.append(". idle")
    homes = [
        (micro_batch.home, name.replica)
        for name, lane in lanes.items()
        for micro_batch in lane.micro_batches
        if micro_batch is not None
    ]
    if any(home != replica for home, replica in homes):
        words.append(f"F3{_FOREIGN}1 micro-batch 3 of replica 1")
    lines = ["   ".join(words)]
    units = ", ".join(f"{op.mnemonic} {cost:g}" for op, cost in UNIT_COST.items() if op in used)
    lines.append(f"units of time: {units}; transfers 0")
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
