"""Plans in which some micro-batches run at home again; the rest of the orders stays."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.compiler.planner.planned import Item, Order, Planned
from resihp.ir.model import Op

__all__ = ["at_home", "swapped"]


def swapped(planned: Planned, one: Item, other: Item, stages: Sequence[int]) -> Planned:
    """Each of two exchanged micro-batches at home, in the place that the other one had there."""
    changed = planned
    for stage in stages:
        for mine, guest in ((one, other), (other, one)):
            order = tuple(
                (op, -1, mine[1]) if (home, number) == guest else (op, home, number)
                for op, home, number in changed.orders[mine[0]][stage]
            )
            changed = _with_order(changed, mine[0], stage, order)
    return _placed_home(_placed_home(changed, one, stages), other, stages)


def at_home(planned: Planned, item: Item, stages: Sequence[int]) -> Planned:
    """`item` run by its home, between the micro-batches with the numbers next to its own."""
    home, number = item
    changed = planned
    for stage in stages:
        taker = planned.placing[item][stage]
        order = planned.orders[taker][stage]
        left = tuple(work for work in order if work[1:] != item)
        changed = _with_order(changed, taker, stage, left)
        ops = [work[0] for work in order if work[1:] == item]
        mine = _inserted(planned.orders[home][stage], number, ops)
        changed = _with_order(changed, home, stage, mine)
    return _placed_home(changed, item, stages)


def _inserted(order: Order, number: int, ops: Sequence[Op]) -> Order:
    """`order` with `ops` of the replica's own `number`, one after the other."""
    works, after = list(order), 0
    for op in ops:
        after = max(after, _place(works, op, number))
        works.insert(after, (op, -1, number))
        after += 1
    return tuple(works)


def _place(works: Sequence[tuple[Op, int, int]], op: Op, number: int) -> int:
    """Before the next number; where there is none behind the last one."""
    same = [index for index, work in enumerate(works) if work[0] is op]
    later = (index for index in same if works[index][2] > number)
    return next(later, same[-1] + 1 if same else len(works))


def _with_order(planned: Planned, replica: int, stage: int, order: Order) -> Planned:
    rows = list(planned.orders[replica])
    rows[stage] = order
    return planned._replace(orders={**planned.orders, replica: tuple(rows)})


def _placed_home(planned: Planned, item: Item, stages: Sequence[int]) -> Planned:
    where = {s: taker for s, taker in planned.placing[item].items() if s not in stages}
    placing = {**planned.placing, item: where}
    if not where:
        del placing[item]
    return planned._replace(placing=placing)
