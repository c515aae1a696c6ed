"""Automatic schedules: orders for the costs and the memory of the groups of a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from resihp.compiler.capacity import oversized
from resihp.compiler.costs import Lengths
from resihp.compiler.lower import lower
from resihp.compiler.pipelines import chunks_of, pipeline_rows, pipelines_of
from resihp.compiler.planner.automatic import automatic
from resihp.compiler.planner.planned import Planned
from resihp.compiler.planner.problem import Problem, Replica
from resihp.compiler.planner.replay import ItemCosts, replay
from resihp.compiler.pricing import Pricing
from resihp.compiler.schedules import ONE_STAGE, Work, schedule_order
from resihp.compiler.with_orders import PipelineOrder, with_orders
from resihp.errors import UserError
from resihp.ir.model import GroupName, MicroBatch, Plan

__all__ = ["automatically_ordered"]

_NUM_RETRIES = 4
"""How often an order that lacks memory is made again with less."""
_NEVER = 1 << 62
_Orders = Mapping[int, PipelineOrder]
"""Of each replica."""


def automatically_ordered(
    plan: Plan,
    kind: str,
    work: Mapping[int, Sequence[MicroBatch]],
    pricing: Pricing | None,
    lengths: Sequence[Lengths] | None,
) -> Plan:
    """The schedule `kind` of `plan`, whose orders fit into its memory when they are lowered.

    What the planner counts differs from what the verifier counts in buffers; where that matters
    each group is left less, and a named order that is shorter, and fits when lowered though by the
    planner's count it does not, is taken instead. Where nothing fits each replica runs 1F1B, which
    needs least.

    Raises UserError for a plan that says nothing of memory.
    """
    if plan.memory_bytes is None:
        raise UserError(
            f"schedule {kind} is made for the memory of the devices, and the plan has no `memory` "
            "line; nearest valid: zb-h1"
        )
    maker = _Maker(plan, pricing, lengths or [Lengths.of([plan.batch.tokens])])
    best = _made(plan, kind, work, maker)
    best_ticks = maker.ticks(work, best) if best is not None else _NEVER
    for name in ONE_STAGE:
        known = _named(plan, name, work)
        ticks = maker.ticks(work, known)
        if ticks < best_ticks and not oversized(lower(with_orders(plan, kind, work, known))):
            best, best_ticks = known, ticks
    return with_orders(plan, kind, work, best or _named(plan, "1f1b", work))


def _made(
    plan: Plan, kind: str, work: Mapping[int, Sequence[MicroBatch]], maker: _Maker
) -> _Orders | None:
    """Orders that fit when they are lowered; None where there are none after some tries."""
    reserved: dict[GroupName, int] = defaultdict(int)
    for _ in range(_NUM_RETRIES):
        orders = maker.orders(work, reserved)
        too_big = oversized(lower(with_orders(plan, kind, work, orders)))
        if not too_big:
            return orders
        for excess in too_big:
            reserved[excess.group.name] += excess.needed_bytes - excess.capacity_bytes
    return None


def _named(plan: Plan, name: str, work: Mapping[int, Sequence[MicroBatch]]) -> _Orders:
    """The order of a named schedule in all replicas; those with as much work share it."""
    known = {count: _order_of(name, plan.mesh.pp, count) for count in map(len, work.values())}
    return {replica: known[len(items)] for replica, items in work.items()}


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

    def ticks(self, work: Mapping[int, Sequence[MicroBatch]], orders: _Orders) -> int:
        """Until the last replica has computed its `work` in its order."""
        rows = pipeline_rows(self._plan, self._pricing, self._lengths, {})
        known: dict[object, int] = {}
        for replica, items in work.items():
            each = tuple(map(self._length_of, items))
            key = rows[replica], each if self._differ else len(items), id(orders[replica])
            if key not in known:
                known[key] = self._ticks(replica, rows[replica], each, orders[replica])
        return max(known.values(), default=0)

    def _ticks(
        self, replica: int, row: Replica, lengths: Sequence[Lengths], order: PipelineOrder
    ) -> int:
        works = tuple(
            tuple((each.op, -1, each.microbatch) for each in order[stage])
            for stage in range(len(row.chunks))
        )
        planned = Planned(0, {0: works}, {}, complete=True)
        costs = self._costs(replica, lengths) if self._differ else None
        found = replay(_alone(row, len(lengths)), planned, costs)
        assert found is not None, "orders of a schedule go on at any costs"
        return found

    def _length_of(self, item: MicroBatch) -> Lengths:
        index = item.home * self._plan.batch.microbatches + item.number
        return self._lengths[index % len(self._lengths)]

    def _order(self, replica: int, row: Replica, lengths: Sequence[Lengths]) -> PipelineOrder:
        """The order for one replica; 1F1B's where nothing fits."""
        costs = self._costs(replica, lengths) if self._differ else None
        planned = automatic(_alone(row, len(lengths)), costs)
        if not planned.complete:
            return _order_of("1f1b", len(row.chunks), len(lengths))
        return {
            stage: tuple(Work(op, stage, number) for op, _, number in order)
            for stage, order in enumerate(planned.orders[0])
        }

    def _costs(self, replica: int, lengths: Sequence[Lengths]) -> ItemCosts:
        """Of single micro-batches, by number."""
        table = [
            [chunks_of(self._plan, group, self._pricing, each) for each in lengths]
            for group in self._groups[replica]
        ]
        return lambda _, stage, item: table[stage][item[1]]


def _alone(row: Replica, num_microbatches: int) -> Problem:
    """The problem of one replica."""
    return Problem((row,), num_microbatches, (0,) * (len(row.chunks) - 1), split=True)


def _order_of(name: str, num_stages: int, num_microbatches: int) -> PipelineOrder:
    return dict(enumerate(schedule_order(name, num_stages, num_microbatches)))
