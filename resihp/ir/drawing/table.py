"""A scene in figures: busy and idle time and memory of every group that is shown."""

from __future__ import annotations

from collections.abc import Iterator

from resihp.ir.drawing.axis import spell_time
from resihp.ir.drawing.scene import Panel, Row, Scene
from resihp.ir.statements import spell_numbers
from resihp.ir.verify.memory import readable_bytes

__all__ = ["draw_table"]

_HEAD = ("", "speed", "busy", "idle", "memory of a rank")
_UNKNOWN = "-"


def draw_table(scene: Scene) -> str:
    """Lines of text, a row for each group; no column of what is the usual or unknown of all."""
    clock = scene.played.clock
    rows = [_HEAD, *(_cells(scene, panel, row) for panel in scene.panels for row in panel.rows)]
    if all(row[1] == "1" for row in rows[1:]):
        rows = [(row[0], *row[2:]) for row in rows]
    if all(row[-1] == _UNKNOWN for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{clock.note}: {spell_time(scene.length, clock)}, bubble {scene.bubble:.1%}"]
    for row in rows:
        first, *others = (
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join((first, *others)).rstrip())
    lines += _left_out(scene)
    return "\n".join(lines) + "\n"


def _cells(scene: Scene, panel: Panel, row: Row) -> tuple[str, ...]:
    replicas = spell_numbers(sorted(panel.alike))
    return (
        f"dp{replicas}.pp{row.group.pp}",
        f"{row.speed:.3g}",
        spell_time(row.busy, scene.played.clock),
        f"{row.idle / (scene.length or 1):.0%}",
        _memory(scene, row),
    )


def _memory(scene: Scene, row: Row) -> str:
    if row.memory is None:
        return _UNKNOWN
    capacity = scene.played.capacity_bytes
    of = "" if capacity is None else f" of {readable_bytes(capacity)}"
    return f"{readable_bytes(row.memory.peak_bytes)}{of}"


def _left_out(scene: Scene) -> Iterator[str]:
    if scene.num_left_out:
        yield f"and {scene.num_left_out} more kinds of replicas"
