"""From a schedule to a plan: the order of F, B and W in, everything that the groups run out.

    finish      reduce_grads of every stage, and step
    transfers   send and receive of what crosses between groups
    chunks      scatter and gather where their TP degrees differ

They are given one replica of each kind, and what they make is copied to the others; so a large
job costs as much as it has different replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resihp.compiler.kinds import classes_of, first_of_each, for_all, kinds_of
from resihp.compiler.lower.cuts import Scatter, cuts_of, everywhere
from resihp.compiler.lower.finish import add_finish
from resihp.compiler.lower.steps import bodies_of, replace_bodies
from resihp.compiler.lower.transfers import add_transfers_together
from resihp.errors import UserError
from resihp.ir.model import GroupName, Instr, Level, Op, Plan
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
    late = transport_of(schedule).kind == "edge"
    mark = None if scatter is None else cuts_of(schedule, scatter)
    kinds = (classes_of if late else kinds_of)(schedule, mark)
    plan = add_finish(first_of_each(schedule, kinds), cost)
    if not late and last_pass != "finish":
        plan = add_transfers_together(plan, cost)
    bodies = _added(schedule, bodies_of(plan), scatter, last_pass, late=late)
    return for_all(schedule, replace_bodies(plan, bodies), kinds)


def _added(
    schedule: Plan,
    bodies: Mapping[GroupName, Sequence[Instr]],
    scatter: Scatter | None,
    last_pass: str,
    *,
    late: bool,
) -> Mapping[GroupName, tuple[Instr, ...]]:
    """`bodies` with all that is added by arithmetic: transfers that are `late`, and chunks."""
    # Who reads plans should not wait for numpy.
    from resihp.compiler.lower import flat as arrays
    from resihp.compiler.lower.chunks import add_chunks
    from resihp.compiler.lower.late import add_late_transfers

    flat = arrays.flat_of(schedule, bodies)
    if late and last_pass != "finish":
        flat = add_late_transfers(flat)
    if last_pass == "chunks":
        flat = add_chunks(flat, scatter)
    return arrays.bodies_of(flat)


def transport_of(schedule: Plan) -> Transport:
    """What `schedule` is lowered for.

    Raises UserError for what is no schedule, or an unknown transport.
    """
    if schedule.level is not Level.SCHEDULE:
        raise UserError("this is a plan already: only a text that starts with `schedule 1` lowers")
    return parse_transport(schedule.transport or "edge")
