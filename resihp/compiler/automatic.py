"""Automatic schedules: orders for the costs and the memory of the groups of a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from resihp.compiler.capacity import oversized
from resihp.compiler.costs import Lengths
from resihp.compiler.lower import lower
from resihp.compiler.pipelines import chunks_of, pipeline_rows, pipelines_of
from resihp.compiler.planner.automatic import automatic
from resihp.compiler.planner.problem import Problem, Replica
from resihp.compiler.planner.replay import ItemCosts
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
    plan: Plan,
    kind: str,
    work: Mapping[int, Sequence[MicroBatch]],
    pricing: Pricing | None,
    lengths: Sequence[Lengths] | None,
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
    maker = _Maker(plan, pricing, lengths or [Lengths.of([plan.batch.tokens])])
    reserved: dict[GroupName, int] = defaultdict(int)
    for _ in range(_NUM_RETRIES):
        schedule = with_orders(plan, kind, work, maker.orders(work, reserved))
        too_big = oversized(lower(schedule))
        if not too_big:
            return schedule
        for excess in too_big:
            reserved[excess.group.name] += excess.needed_bytes - excess.capacity_bytes
    least = {count: _one_f_one_b(plan.mesh.pp, count) for count in map(len, work.values())}
    orders = {replica: least[len(items)] for replica, items in work.items()}
    return with_orders(plan, kind, work, orders)


class _Maker:
    """Makes the orders of all replicas; of those that are alike once."""

    def __init__(self, plan: Plan, pricing: Pricing | None, lengths: Sequence[Lengths]) -> None:
        self._plan = plan
        self._pricing = pricing
        self._lengths = lengths
        self._differ = pricing is not None and len(set(lengths)) > 1
        self._groups = pipelines_of(plan)

    def orders(
        self, work: Mapping[int, Sequence[MicroBatch]], reserved: Mapping[GroupName, int]
    ) -> dict[int, PipelineOrder]:
        """Of each replica for its `work`, with `reserved` bytes less in some groups."""
        rows = pipeline_rows(self._plan, self._pricing, self._lengths, reserved)
        known: dict[object, PipelineOrder] = {}
        orders: dict[int, PipelineOrder] = {}
        for replica, items in work.items():
            each = tuple(map(self._length_of, items))
            key = rows[replica], each if self._differ else len(items)
            if key not in known:
                known[key] = self._order(replica, rows[replica], each)
            orders[replica] = known[key]
        return orders

    def _length_of(self, item: MicroBatch) -> Lengths:
        index = item.home * self._plan.batch.microbatches + item.number
        return self._lengths[index % len(self._lengths)]

    def _order(self, replica: int, row: Replica, lengths: Sequence[Lengths]) -> PipelineOrder:
        """The order for one replica; 1F1B's where nothing fits."""
        num_stages = len(row.chunks)
        problem = Problem((row,), len(lengths), (0,) * (num_stages - 1), split=True)
        planned = automatic(problem, self._costs(replica, lengths) if self._differ else None)
        if not planned.complete:
            return _one_f_one_b(num_stages, len(lengths))
        return {
            stage: tuple(Work(op, stage, number) for op, _, number in order)
            for stage, order in enumerate(planned.orders[0])
        }

    def _costs(self, replica: int, lengths: Sequence[Lengths]) -> ItemCosts:
        """Of single micro-batches, by number."""
        table = [
            [chunks_of(group, self._pricing, each) for each in lengths]
            for group in self._groups[replica]
        ]
        return lambda _, stage, item: table[stage][item[1]]


def _one_f_one_b(num_stages: int, num_microbatches: int) -> PipelineOrder:
    return dict(enumerate(schedule_order("1f1b", num_stages, num_microbatches)))
