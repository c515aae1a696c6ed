"""The phases of a pipeline: filling, steady, draining, and what closes the iteration."""

from __future__ import annotations

from typing import NamedTuple

from resihp.ir.drawing.scene import Panel
from resihp.ir.model import Op

__all__ = ["Phase", "phases_of"]


class Phase(NamedTuple):
    """A span of time of one replica."""

    name: str
    start: float
    end: float


def phases_of(panel: Panel) -> list[Phase]:
    """Warm-up until the first backward starts, cool-down from the end of the last forward on.

    Where all backwards come after all forwards there is nothing in between. None without both.
    """
    boxes = [box for row in panel.rows for box in row.boxes]
    marks = [mark for row in panel.rows for mark in row.marks]
    first_backward = min((box.start for box in boxes if box.op is not Op.F), default=None)
    last_forward = max((box.end for box in boxes if box.op is Op.F), default=None)
    if first_backward is None or last_forward is None:
        return []
    computed = max(box.end for box in boxes)
    closed = max((mark.end for mark in marks), default=computed)
    if last_forward <= first_backward:
        phases = [Phase("forward", 0.0, last_forward), Phase("backward", last_forward, computed)]
    else:
        phases = [
            Phase("warm-up", 0.0, first_backward),
            Phase("steady", first_backward, last_forward),
            Phase("cool-down", last_forward, computed),
        ]
    return [*phases, Phase("reduce, step", computed, closed)]
