"""Automatic schedules: orders for the costs and the memory of the groups of a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from resihp.compiler.capacity import oversized
from resihp.compiler.lower import lower
from resihp.compiler.pipelines import pipeline_rows
from resihp.compiler.planner.automatic import automatic
from resihp.compiler.planner.problem import Problem, Replica
from resihp.compiler.pricing import Pricing
from resihp.compiler.schedules import Work, schedule_order
from resihp.compiler.with_orders import PipelineOrder, with_orders
from resihp.errors import UserError
from resihp.ir.lanes import MicroBatch
from resihp.ir.model import GroupName, Plan

__all__ = ["automatically_ordered"]

_NUM_RETRIES = 4
"""How often an order that lacks memory is made again with less."""


def automatically_ordered(
    plan: Plan, kind: str, work: Mapping[int, Sequence[MicroBatch]], pricing: Pricing | None
) -> Plan:
    """The schedule `kind` of `plan`, whose orders fit into its memory when they are lowered.

    What the planner counts differs from what the verifier counts in buffers; where that matters
    each group is left less. Where nothing fits each replica runs 1F1B, which needs least.

    Raises UserError for a plan that says nothing of memory.
    """
    if plan.memory_bytes is None:
        raise UserError(
            f"schedule {kind} is made for the memory of the devices, and the plan has no `memory` "
            "line; nearest valid: zb-h1"
        )
    reserved: dict[GroupName, int] = defaultdict(int)
    for _ in range(_NUM_RETRIES):
        rows = pipeline_rows(plan, pricing, reserved)
        known: dict[tuple[Replica, int], PipelineOrder] = {}
        for replica, items in work.items():
            key = rows[replica], len(items)
            if key not in known:
                known[key] = _order(*key)
        orders = {replica: known[rows[replica], len(items)] for replica, items in work.items()}
        schedule = with_orders(plan, kind, work, orders)
        too_big = oversized(lower(schedule))
        if not too_big:
            return schedule
        for excess in too_big:
            reserved[excess.group.name] += excess.needed_bytes - excess.capacity_bytes
    num_stages = plan.mesh.pp
    least = {count: _one_f_one_b(num_stages, count) for count in map(len, work.values())}
    orders = {replica: least[len(items)] for replica, items in work.items()}
    return with_orders(plan, kind, work, orders)


def _order(row: Replica, num_microbatches: int) -> PipelineOrder:
    """The order for one replica; 1F1B's where nothing fits."""
    num_stages = len(row.chunks)
    problem = Problem((row,), num_microbatches, (0,) * (num_stages - 1), split=True)
    planned = automatic(problem)
    if not planned.complete:
        return _one_f_one_b(num_stages, num_microbatches)
    return {
        stage: tuple(Work(op, stage, number) for op, _, number in order)
        for stage, order in enumerate(planned.orders[0])
    }


def _one_f_one_b(num_stages: int, num_microbatches: int) -> PipelineOrder:
    return dict(enumerate(schedule_order("1f1b", num_stages, num_microbatches)))
