"""Orders of numbers as streams that name micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from resihp.compiler.schedules import Work
from resihp.ir.model import Instr, Level, MicroBatch, Plan, Stream
from resihp.ir.placement import placement_of

__all__ = ["PipelineOrder", "with_orders"]

PipelineOrder = Mapping[int, Sequence[Work]]
"""What each position of one replica computes; micro-batches are numbers of its list of work."""


def with_orders(
    plan: Plan,
    kind: str,
    work: Mapping[int, Sequence[MicroBatch]],
    orders: Mapping[int, PipelineOrder],
) -> Plan:
    """The schedule called `kind` in which each replica of `plan` runs its `work` in its order.

    Groups of a position that do the same share a stream; they do if they share an order.
    """
    several = {pp for pp, stages in placement_of(plan).stages.items() if len(stages) > 1}
    named = {
        replica: tuple((item.number, None if item.home == replica else item.home) for item in items)
        for replica, items in work.items()
    }
    replicas: dict[tuple[int, tuple[tuple[int, int | None], ...], int], list[int]] = {}
    for group in plan.groups:
        order = orders[group.replica][group.pp]
        replicas.setdefault((group.pp, named[group.replica], id(order)), []).append(group.replica)
    streams = tuple(
        Stream(
            replicas=tuple(members),
            pp=pp,
            body=tuple(
                Instr(each.op, *names[each.microbatch], each.stage if pp in several else None)
                for each in orders[members[0]][pp]
            ),
        )
        for (pp, names, _), members in replicas.items()
    )
    return msgspec.structs.replace(plan, streams=streams, schedule=kind, level=Level.SCHEDULE)
