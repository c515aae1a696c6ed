"""Who runs which micro-batches, and in which order: a plan at the level of a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from resihp.compiler.schedules import AUTOMATIC, order_at
from resihp.compiler.with_orders import with_orders
from resihp.ir.model import MicroBatch, Plan
from resihp.ir.placement import placement_of

if TYPE_CHECKING:
    from resihp.compiler.costs import Lengths
    from resihp.compiler.pricing import Pricing

__all__ = ["home_work", "ordered", "spread_work"]


def home_work(replicas: Iterable[int], num_microbatches: int) -> dict[int, list[MicroBatch]]:
    """What each replica runs when each runs its own."""
    return {
        replica: [MicroBatch(replica, number) for number in range(num_microbatches)]
        for replica in replicas
    }


def spread_work(
    replicas: Sequence[int], num_replicas: int, num_microbatches: int
) -> dict[int, list[MicroBatch]]:
    """What each of the `replicas` that are left runs: its own, then its share of the others'.

    The micro-batches of the replicas that are gone are dealt out in runs whose lengths differ by
    at most one; a run may begin in one home and end in the next.
    """
    work = home_work(replicas, num_microbatches)
    gone = [replica for replica in range(num_replicas) if replica not in work]
    homeless = [MicroBatch(home, number) for home in gone for number in range(num_microbatches)]
    for index, replica in enumerate(replicas):
        first = index * len(homeless) // len(replicas)
        end = (index + 1) * len(homeless) // len(replicas)
        work[replica] += homeless[first:end]
    return work


def ordered(
    plan: Plan,
    kind: str,
    work: Mapping[int, Sequence[MicroBatch]],
    pricing: Pricing | None = None,
    lengths: Sequence[Lengths] | None = None,
) -> Plan:
    """The schedule in which each replica of `plan` runs the order `kind` over its `work`.

    Foreign micro-batches are treated like a replica's own. Groups of a position that do the same
    share a stream. `kind` runs on the stages of the plan (`runs_on`), all of them in each replica.
    An automatic schedule is made for the plan's memory and for `pricing`, or for F, B and W of
    equal length in proportion to the layers of a rank. `lengths` are those of the micro-batches of
    all replicas, home after home; fewer repeat (None: each is one document).

    Raises UserError for an automatic schedule and a plan that says nothing of memory.
    """
    if kind in AUTOMATIC:
        # The planner takes a while to load, and nothing else here needs it.
        from resihp.compiler.automatic import automatically_ordered

        return automatically_ordered(plan, kind, work, pricing, lengths)
    stages = placement_of(plan).stages
    positions = sorted(stages)
    held = [stages[pp] for pp in positions]
    orders = {
        count: dict(zip(positions, order_at(kind, held, count), strict=True))
        for count in {len(items) for items in work.values()}
    }
    return with_orders(
        plan, kind, work, {replica: orders[len(items)] for replica, items in work.items()}
    )
