"""A scene as JSON: every instruction of every shown group with its start and its end."""

from __future__ import annotations

from typing import Literal

import msgspec

from resihp.ir.drawing.scene import Panel, Row, Scene

__all__ = ["Document", "TimedGroup", "TimedInstr", "TimedReplica", "document_of"]


class TimedInstr(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instruction of a group."""

    index: int
    """In the stream."""
    op: str
    """As plans spell it."""
    start: float
    end: float
    stage: int | None = None
    home: int | None = None
    """Logical replica that the micro-batch belongs to."""
    microbatch: int | None = None
    paired: bool = False
    """Computed overlapped with the next one."""


class TimedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What one group runs."""

    group: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    speed: float
    """Of its slowest member, 1 for a healthy one."""
    busy: float
    """Time in which it computes."""
    idle: float
    """Time in which it waits."""
    memory: tuple[tuple[float, int], ...] | None
    """Bytes that one member needs from each time on."""
    stuck_at: str | None
    """The instruction that waits for ever."""
    instrs: tuple[TimedInstr, ...]


class TimedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica, and all that do the same at the same time."""

    replica: int
    alike: tuple[int, ...]
    groups: tuple[TimedGroup, ...]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The whole picture."""

    model: str
    unit: Literal["s", "unit"]
    """Of all times."""
    times: str
    """Where they come from."""
    iteration: float
    bubble: float
    """Share of the iteration in which a rank waits, on the average over all that compute."""
    capacity_bytes: int | None
    """Memory of one device."""
    replicas: tuple[TimedReplica, ...]
    num_left_out: int
    """Kinds of replicas that are not here."""
    standby: tuple[int, ...]
    lost: tuple[int, ...]


def document_of(scene: Scene) -> Document:
    """The scene as data."""
    played = scene.played
    return Document(
        model=played.plan.model.name,
        unit=played.clock.unit,
        times=played.clock.note,
        iteration=scene.length,
        bubble=scene.bubble,
        capacity_bytes=played.capacity_bytes,
        replicas=tuple(_replica(scene, panel) for panel in scene.panels),
        num_left_out=scene.num_left_out,
        standby=played.plan.standby,
        lost=played.plan.lost,
    )


def _replica(scene: Scene, panel: Panel) -> TimedReplica:
    groups = tuple(_group(scene, row) for row in panel.rows)
    return TimedReplica(replica=panel.replica, alike=panel.alike, groups=groups)


def _group(scene: Scene, row: Row) -> TimedGroup:
    curve = row.memory
    return TimedGroup(
        group=str(row.group.name),
        ranks=row.group.ranks,
        stages=row.stages,
        speed=row.speed,
        busy=row.busy,
        idle=row.idle,
        memory=None if curve is None else tuple(zip(curve.times, curve.num_bytes, strict=True)),
        stuck_at=row.stuck,
        instrs=_instrs(scene, row),
    )


def _instrs(scene: Scene, row: Row) -> tuple[TimedInstr, ...]:
    lane, timeline = scene.played.lanes[row.lane], scene.played.timeline
    found: list[TimedInstr] = []
    times = zip(timeline.starts[row.lane], timeline.ends[row.lane], strict=True)
    for index, (start, end) in enumerate(times):
        instr, task = lane.body[index], lane.tasks[index]
        meeting = lane.meeting(index)
        stage = meeting.stage if meeting is not None and meeting.stage >= 0 else None
        home = None
        if task is not None:
            stage = task.stage
            home = row.group.replica if task.home == row.lane.replica else task.home
        found.append(
            TimedInstr(
                index=index,
                op=instr.op.mnemonic,
                start=start,
                end=end,
                stage=stage,
                home=home,
                microbatch=instr.microbatch,
                paired=index in lane.pairs,
            )
        )
    return tuple(found)
