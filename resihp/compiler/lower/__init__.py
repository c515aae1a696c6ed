"""From a schedule to a plan: the order of F, B and W in, everything that the groups run out.

    finish      reduce_grads of every stage, and step
    transfers   send and receive of what crosses between groups
    chunks      scatter and gather where their TP degrees differ

Passes are pure functions from plan to plan. They look at one replica of each kind, and equal
streams of a position are one, so a large healthy job costs no more than a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from resihp.compiler.lower.chunks import add_chunks
from resihp.compiler.lower.finish import add_finish
from resihp.compiler.lower.transfers import add_transfers
from resihp.errors import UserError
from resihp.ir.model import Level, Op, Plan
from resihp.ir.timeline import UNIT_COST
from resihp.ir.transport import parse_transport

__all__ = ["PASSES", "Pass", "lower", "passes_for"]

PASSES = ("finish", "transfers", "chunks")
"""Names of the passes, in their order."""


class Pass(NamedTuple):
    """One step of the way down."""

    name: str
    apply: Callable[[Plan], Plan]


def lower(
    schedule: Plan,
    *,
    scatter_everywhere: bool = False,
    cost: Mapping[Op, float] = UNIT_COST,
) -> Plan:
    """The plan of a verified schedule, for the transport that it names (`edge` if none).

    Raises UserError for what is no schedule, or one that cannot run.
    """
    plan = schedule
    for step in passes_for(schedule, scatter_everywhere=scatter_everywhere, cost=cost):
        plan = step.apply(plan)
    return plan


def passes_for(
    schedule: Plan,
    *,
    scatter_everywhere: bool = False,
    cost: Mapping[Op, float] = UNIT_COST,
) -> tuple[Pass, ...]:
    """The passes that lower `schedule`, each to be applied to what the one before gave.

    Under `edge` receives are late. Under the other transports sends and receives are listed
    together: with one queue for both directions, or with sends that block, a late receive can
    hold up the whole pipeline. `cost` is what the schedule is played with; any cost gives a
    right plan, the real one the best. `scatter_everywhere` cuts between equal TP degrees too.

    Raises UserError for what is no schedule, or an unknown transport.
    """
    if schedule.level is not Level.SCHEDULE:
        raise UserError("this is a plan already: only a text that starts with `schedule 1` lowers")
    transport = parse_transport(schedule.transport or "edge")
    together = transport.kind != "edge"
    steps = (
        partial(add_finish, cost=cost),
        partial(add_transfers, cost=cost, together=together),
        partial(add_chunks, everywhere=scatter_everywhere),
    )
    return tuple(Pass(name, step) for name, step in zip(PASSES, steps, strict=True))
