"""How a worker chooses that waits for an F or B that is on its way, rather than begin a W."""

from __future__ import annotations

from resihp.compiler.planner.planned import Style
from resihp.compiler.planner.workers import IDLE, Worker
from resihp.ir.model import Op

__all__ = ["choice"]

_NEVER = 1 << 62


def choice(worker: Worker, now: int, backward: int, style: Style) -> int:
    """The operation that a free worker starts, or IDLE. `backward` is B, or BW where not split."""
    blocked = False
    if worker.ready_b:
        if not (worker.waiting_w and worker.room < worker.held):
            return backward
        blocked = True
    if worker.ready_f:
        if worker.in_flight < worker.bound and worker.room >= worker.needed:
            return Op.F
        blocked = True
    if worker.waiting_w and (blocked or _fits(worker, now, style)):
        return Op.W
    return IDLE


def _fits(worker: Worker, now: int, style: Style) -> bool:
    """Whether a W delays no F or B that is on its way by more than the style allows."""
    coming = _NEVER
    lower, upper = worker.lower, worker.upper
    if lower is not None and lower.doing == Op.F:
        coming = lower.ends_at + lower.edge_up
    if upper is not None and upper.doing in (Op.B, Op.BW):
        coming = min(coming, upper.ends_at + upper.edge_down)
    return now + worker.weight * (1 - style.overrun) <= coming
