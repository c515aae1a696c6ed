"""How a worker chooses that does not always do the most urgent thing that is there."""

from __future__ import annotations

import random

from resihp.compiler.planner.planned import Style
from resihp.compiler.planner.workers import IDLE, Worker
from resihp.ir.model import Op

__all__ = ["choice"]

_NEVER = 1 << 62


def choice(
    worker: Worker, now: int, backward: int, style: Style, whims: random.Random | None
) -> int:
    """The operation that a free worker starts, or IDLE. `backward` is B, or BW where not split.

    On a whim it does the second best, or where there is but one thing waits for what comes next.
    """
    options = _options(worker, now, backward, style)
    if whims is not None and options and whims.random() < style.whim:
        if len(options) > 1:
            return options[1]
        if _next_arrival(worker) < _NEVER:
            return IDLE
    return options[0] if options else IDLE


def _options(worker: Worker, now: int, backward: int, style: Style) -> list[int]:
    """What can be started, the most urgent first."""
    options: list[int] = []
    blocked = False
    if worker.ready_b:
        if not (worker.waiting_w and worker.room < worker.held):
            options.append(backward)
        else:
            blocked = True
    if worker.ready_f:
        if worker.has_room:
            options.insert(0 if style.forward_first else len(options), Op.F)
        elif not options:
            blocked = True
    if worker.waiting_w and (blocked or _fits(worker, now, style)):
        options.append(Op.W)
    return options


def _fits(worker: Worker, now: int, style: Style) -> bool:
    """Whether a W delays no F or B that is on its way by more than the style allows."""
    if style.overrun >= 1:
        return True
    return now + worker.weight * (1 - style.overrun) <= _next_arrival(worker)


def _next_arrival(worker: Worker) -> int:
    """When what a neighbour computes now, and there is room for, can be here."""
    coming = _NEVER
    lower, upper = worker.lower, worker.upper
    if lower is not None and lower.doing == Op.F and worker.has_room:
        coming = lower.ends_at + lower.edge_up
    has_room = worker.room >= worker.held or not worker.waiting_w
    if upper is not None and upper.doing in (Op.B, Op.BW) and has_room:
        coming = min(coming, upper.ends_at + upper.edge_down)
    return coming
