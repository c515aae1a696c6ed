"""What a picture shows, whoever draws it: replicas, their groups, and what each runs when.

A large job has few kinds of replicas. One of each kind is shown, the kinds that differ from the
plain layout before the others, until the picture is full; what is left out is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from resihp.errors import UserError
from resihp.ir.drawing.memory import Curve, memory_curves
from resihp.ir.facts import Facts
from resihp.ir.lanes import Lane, Task
from resihp.ir.model import Group, GroupName, Op, Plan
from resihp.ir.statements import spell_numbers
from resihp.ir.timeline import Timeline

__all__ = ["Box", "Clock", "Mark", "Panel", "Played", "Row", "Scene", "scene_of"]

MAX_ROWS = 64
"""Groups that are shown where nothing is chosen."""
MAX_CHOSEN_ROWS = 512


class Clock(NamedTuple):
    """What the times of a timeline count."""

    unit: Literal["s", "unit"]
    note: str
    """Where the times come from."""


class Played(NamedTuple):
    """A plan with all that is known of its run: what pictures are made of."""

    plan: Plan
    lanes: Mapping[GroupName, Lane]
    timeline: Timeline
    clock: Clock
    kinds: Mapping[int, tuple[int, ...]]
    """Replicas that do the same at the same time, by the one of them that has lanes."""
    facts: Facts | None = None
    """Sizes of everything; None where memory is not told."""
    speeds: Mapping[int, float] = {}
    """Of slow ranks, relative to a healthy one."""
    capacity_bytes: int | None = None
    """Memory of one device."""


class Box(NamedTuple):
    """One compute instruction."""

    start: float
    end: float
    op: Op
    task: Task
    at: int
    """Index in the stream."""
    half: Literal[0, 1, 2]
    """1 and 2: the first and the second of an overlapped pair, which share `start` and `end`."""


class Mark(NamedTuple):
    """`reduce_grads` of a stage, or `step` (stage None)."""

    op: Op
    stage: int | None
    start: float
    end: float


class Row(NamedTuple):
    """One group."""

    group: Group
    lane: GroupName
    """Of the group whose times are shown: this one's, or those of one that does the same."""
    stages: tuple[int, ...]
    boxes: tuple[Box, ...]
    marks: tuple[Mark, ...]
    busy: float
    """Time in which the group computes."""
    idle: float
    """Time in which it waits: neither computes nor reduces nor steps."""
    speed: float
    """Of its slowest member."""
    memory: Curve | None
    stuck: str | None
    """The instruction that waits for ever."""

    @property
    def homes(self) -> frozenset[int]:
        """Other replicas whose micro-batches the group runs."""
        return frozenset(box.task.home for box in self.boxes) - {self.group.replica}


class Panel(NamedTuple):
    """One replica, and all that are like it."""

    replica: int
    alike: tuple[int, ...]
    """With `replica` itself."""
    rows: tuple[Row, ...]


class Scene(NamedTuple):
    """A plan as it is drawn."""

    played: Played
    panels: tuple[Panel, ...]
    num_left_out: int
    """Kinds of replicas that are not drawn."""
    length: float
    """The time of the iteration."""
    bubble: float
    """Share of the iteration in which a rank waits, on the average over all that compute."""

    @property
    def rows(self) -> Iterable[Row]:
        """Of all panels."""
        return (row for panel in self.panels for row in panel.rows)

    @property
    def homes(self) -> tuple[int, ...]:
        """Replicas whose work is drawn at others, ascending."""
        return tuple(sorted(frozenset[int]().union(*(row.homes for row in self.rows))))


def scene_of(played: Played, replicas: Collection[int] | None = None) -> Scene:
    """What is drawn of a plan: `replicas`, or one of each kind as long as there is room.

    Raises UserError for replicas that the plan does not have, and for more than fit.
    """
    shown_for = {one: kind for kind, members in played.kinds.items() for one in members}
    if replicas is None:
        shown = {kind: played.kinds[kind] for kind in sorted(_most_notable(played))}
    else:
        _check_choice(played, replicas, shown_for)
        shown = {one: (one,) for one in sorted(set(replicas))}
    groups: dict[int, dict[int, Group]] = {one: {} for one in shown}
    for group in played.plan.groups:
        if group.replica in shown:
            groups[group.replica].setdefault(group.pp, group)
    length = played.timeline.makespan
    drawn = {shown_for[one] for one in shown}
    memory = _memory(played, drawn)
    panels: list[Panel] = []
    for one, alike in shown.items():
        rows = _rows(played, groups[one].values(), shown_for[one], length, memory)
        panels.append(Panel(one, alike, tuple(rows)))
    num_left_out = len(played.kinds) - len(drawn)
    return Scene(played, tuple(panels), num_left_out, length, _bubble(played, length))


def _memory(played: Played, replicas: Collection[int]) -> Mapping[GroupName, Curve]:
    if played.facts is None:
        return {}
    return memory_curves(played.lanes, played.timeline, played.facts, replicas)


def _check_choice(played: Played, replicas: Collection[int], shown_for: Mapping[int, int]) -> None:
    unknown = sorted(set(replicas) - set(shown_for))
    if unknown:
        raise UserError(
            f"replica {unknown[0]} runs nothing in this plan; those that do: "
            f"{spell_numbers(sorted(shown_for))}"
        )
    room = max(1, MAX_CHOSEN_ROWS // _positions(played))
    if len(set(replicas)) > room:
        raise UserError(f"{len(set(replicas))} replicas do not fit into one picture; {room} do")


def _positions(played: Played) -> int:
    """Most groups that a replica has."""
    return max(Counter(lane.name.replica for lane in played.lanes.values()).values(), default=1)


def _most_notable(played: Played) -> list[int]:
    """The kinds that are drawn: the most common one, then those that differ from it."""
    room = max(1, MAX_ROWS // _positions(played))
    ranked = sorted(played.kinds, key=lambda kind: (-len(played.kinds[kind]), kind))
    if len(ranked) <= room:
        return ranked
    oddness = _oddness(played)
    rest = sorted(ranked[1:], key=lambda kind: (-oddness[kind], kind))
    return [*ranked[:1], *rest][:room]


def _oddness(played: Played) -> Counter[int]:
    """In how many of its groups each kind of replica differs from a healthy one."""
    positions = _positions(played)
    found = Counter(dict.fromkeys(played.kinds, positions))
    for lane in played.lanes.values():
        replica = lane.name.replica
        found[replica] -= (
            lane.group.tp == played.plan.mesh.tp
            and not any(rank in played.speeds for rank in lane.group.ranks)
            and not any(task is not None and task.home != replica for task in lane.tasks)
        )
    return found


def _rows(
    played: Played,
    groups: Iterable[Group],
    kind: int,
    length: float,
    memory: Mapping[GroupName, Curve],
) -> Iterator[Row]:
    for group in sorted(groups, key=lambda group: group.pp):
        lane = played.lanes.get(GroupName(kind, group.pp))
        if lane is not None and lane.name in played.timeline.ends:
            yield _row(played, lane, group, length, memory.get(lane.name))


def _row(played: Played, lane: Lane, group: Group, length: float, memory: Curve | None) -> Row:
    starts, ends = played.timeline.starts[lane.name], played.timeline.ends[lane.name]
    boxes: list[Box] = []
    marks: list[Mark] = []
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        task, op = lane.tasks[index], lane.body[index].op
        if op.is_compute and task is not None:
            home = group.replica if task.home == lane.name.replica else task.home
            head, last = lane.head_of(index), lane.last_of(index)
            half = 1 if last != index else 2 if head != index else 0
            done = ends[min(last, len(ends) - 1)]
            boxes.append(Box(starts[head], done, op, task._replace(home=home), index, half))
        elif op is Op.REDUCE_GRADS or op is Op.STEP:
            meeting = lane.meeting(index)
            stage = None if meeting is None or op is Op.STEP else meeting.stage
            marks.append(Mark(op, stage, start, end))
    stuck = played.timeline.stuck.get(lane.name)
    busy, idle = _spent(lane, played.timeline, length)
    return Row(
        group=group,
        lane=lane.name,
        stages=lane.stages,
        boxes=tuple(boxes),
        marks=tuple(marks),
        busy=busy,
        idle=idle,
        speed=min((played.speeds.get(rank, 1.0) for rank in group.ranks), default=1.0),
        memory=memory,
        stuck=None if stuck is None else lane.text(stuck).strip("`"),
    )


def _spent(lane: Lane, timeline: Timeline, length: float) -> tuple[float, float]:
    """Time in which a group computes, and in which it waits, of an iteration of this `length`."""
    busy = shared = 0.0
    times = zip(lane.body, timeline.starts[lane.name], timeline.ends[lane.name], strict=False)
    for instr, start, end in times:
        if instr.op.is_compute:
            busy += end - start
        elif instr.op is Op.REDUCE_GRADS or instr.op is Op.STEP:
            shared += end - start
    return busy, max(0.0, length - busy - shared)


def _bubble(played: Played, length: float) -> float:
    ranks, idle = 0, 0.0
    for name, lane in played.lanes.items():
        if name in played.timeline.ends:
            weight = len(played.kinds.get(name.replica, (name.replica,))) * lane.group.tp
            ranks += weight
            idle += weight * _spent(lane, played.timeline, length)[1]
    return idle / (ranks * length) if ranks and length else 0.0
