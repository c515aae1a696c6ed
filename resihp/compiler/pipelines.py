"""The replicas of a plan as rows for the planner, where each runs its work alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

from resihp.compiler.capacity import room_of
from resihp.compiler.costs import Lengths
from resihp.compiler.planner.problem import TICK_S, Capacity, Chunks, Replica
from resihp.compiler.pricing import Pricing
from resihp.ir.model import Group, GroupName, Op, Plan

__all__ = ["chunks_of", "pipeline_rows", "pipelines_of"]

_UNIT_TICKS = 1 << 10
"""Of one layer at TP 1 where nothing is known of costs; every degree divides it."""


def pipelines_of(plan: Plan) -> dict[int, list[Group]]:
    """The groups of each replica, by position."""
    held: dict[int, list[Group]] = {}
    for group in sorted(plan.groups, key=lambda group: group.name):
        held.setdefault(group.replica, []).append(group)
    return held


def pipeline_rows(
    plan: Plan,
    pricing: Pricing | None,
    lengths: Sequence[Lengths],
    reserved: Mapping[GroupName, int],
) -> dict[int, Replica]:
    """Costs, memory and hops of each replica of `plan`, which has one stage per position.

    Costs are those of the mean of `lengths`. Without `pricing` F, B and W take one unit per layer,
    divided by the TP degree, and hops none. Groups have `reserved` bytes less.
    """
    count = len(lengths)
    mean = Lengths(*(sum(parts) // count for parts in zip(*lengths, strict=True)))
    return {
        replica: Replica(
            chunks=tuple(chunks_of(plan, group, pricing, mean) for group in groups),
            memory=tuple(_room(plan, group, reserved.get(group.name, 0)) for group in groups),
            edges=tuple(_hop(plan, here, there, pricing) for here, there in pairwise(groups)),
        )
        for replica, groups in pipelines_of(plan).items()
    }


def chunks_of(plan: Plan, group: Group, pricing: Pricing | None, lengths: Lengths) -> Chunks:
    """Ticks of a micro-batch of `lengths` in `group` of `plan`."""
    layers, again = group.sole_layers, group.pp in plan.recompute
    if pricing is None:
        ticks = _UNIT_TICKS * (layers.last - layers.first + 1) // group.tp
        return Chunks(ticks, ticks * (1 + again), ticks)
    seconds = partial(pricing.compute_s, group, layers, lengths=lengths, recomputes=again)
    return Chunks(*(_ticks(seconds(op)) for op in (Op.F, Op.B, Op.W)))


def _room(plan: Plan, group: Group, reserved_bytes: int) -> Capacity:
    room = room_of(plan, group.sole_layers, group.tp, recomputes=group.pp in plan.recompute)
    return room._replace(free=room.free - reserved_bytes)


def _hop(plan: Plan, here: Group, there: Group, pricing: Pricing | None) -> int:
    """From stage to stage, the slower of both directions."""
    if pricing is None:
        return 0
    ways = ((here, there), (there, here))
    return _ticks(max(pricing.crossing(*way, plan.batch.tokens).seconds for way in ways))


def _ticks(seconds: float) -> int:
    return max(1, round(seconds / TICK_S))
