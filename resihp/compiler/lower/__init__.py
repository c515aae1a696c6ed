"""From a schedule to a plan: the order of F, B and W in, everything that the groups run out.

    finish      reduce_grads of every stage, and step
    transfers   send and receive of what crosses between groups
    chunks      scatter and gather where their TP degrees differ

Passes are pure functions from plan to plan. They are given one replica of each kind, and what
they make is copied to the others; so a large job costs as much as it has different replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from resihp.compiler.kinds import first_of_each, for_all, kinds_of
from resihp.compiler.lower.chunks import Scatter, add_chunks, cuts_of, everywhere
from resihp.compiler.lower.finish import add_finish
from resihp.compiler.lower.transfers import add_transfers
from resihp.errors import UserError
from resihp.ir.model import Level, Op, Plan
from resihp.ir.timeline import UNIT_COST
from resihp.ir.transport import Transport, parse_transport

__all__ = ["PASSES", "Scatter", "everywhere", "lower", "transport_of"]

PASSES = ("finish", "transfers", "chunks")
"""Names of the passes, in their order."""


def lower(
    schedule: Plan,
    *,
    scatter: Scatter | None = None,
    cost: Mapping[Op, float] = UNIT_COST,
    last_pass: str = PASSES[-1],
) -> Plan:
    """The plan of a verified schedule, for the transport that it names (`edge` if none).

    Under `edge` receives are late. Under the other transports sends and receives are listed
    together: with one queue for both directions, or with sends that block, a late receive can
    hold up the whole pipeline. `cost` is what the schedule is played with; any cost gives a
    right plan, the real one the best. Tensors are cut between unequal TP degrees, and between the
    equal ones where `scatter` says so of sender and receiver (`Pricing.scatter`: where that is
    faster; `everywhere`). What comes before the end of `last_pass` is for looking at.

    Raises UserError for what is no schedule, or one that cannot run, or an unknown transport.
    """
    transport = transport_of(schedule)
    passes: tuple[Callable[[Plan], Plan], ...] = (
        partial(add_finish, cost=cost),
        partial(add_transfers, cost=cost, together=transport.kind != "edge"),
        partial(add_chunks, scatter=scatter),
    )
    kinds = kinds_of(schedule, None if scatter is None else cuts_of(schedule, scatter))
    plan = first_of_each(schedule, kinds)
    for name, apply in zip(PASSES, passes, strict=True):
        plan = apply(plan)
        if name == last_pass:
            break
    return for_all(schedule, plan, kinds)


def transport_of(schedule: Plan) -> Transport:
    """What `schedule` is lowered for.

    Raises UserError for what is no schedule, or an unknown transport.
    """
    if schedule.level is not Level.SCHEDULE:
        raise UserError("this is a plan already: only a text that starts with `schedule 1` lowers")
    return parse_transport(schedule.transport or "edge")
