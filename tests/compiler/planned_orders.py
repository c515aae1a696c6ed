"""What holds of the orders that any planner makes."""

from __future__ import annotations

from collections import Counter

from resihp.compiler.planner.planned import Planned
from resihp.compiler.planner.problem import Problem
from resihp.ir.model import Op


def check_orders(given: Problem, planned: Planned) -> None:
    """Each chunk runs once, F before B before W, on the replica that the placing names."""
    seen: Counter[tuple[int, int, int, Op]] = Counter()
    for d, stages in planned.orders.items():
        for stage, order in enumerate(stages):
            place: dict[tuple[int, int, Op], int] = {}
            for index, (op, home, number) in enumerate(order):
                item = (d if home < 0 else home, number)
                assert planned.placing.get(item, {}).get(stage, item[0]) == d
                seen[stage, *item, op] += 1
                place[*item, op] = index
            for (home, number, op), index in place.items():
                before = {Op.B: Op.F, Op.BW: Op.F, Op.W: Op.B}.get(op)
                assert before is None or place[home, number, before] < index
    ops = (Op.F, Op.B, Op.W) if given.split else (Op.F, Op.BW)
    assert seen == Counter(
        (stage, home, number, op)
        for stage in range(given.num_stages)
        for home in range(len(given.replicas))
        for number in range(given.num_microbatches)
        for op in ops
        if (home, number) not in given.kept
    )
