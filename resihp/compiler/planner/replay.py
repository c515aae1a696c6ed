"""The time that orders take at other costs than those that they were made for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from resihp.compiler.planner.planned import Item, Planned
from resihp.compiler.planner.problem import Capacity, Chunks, Problem
from resihp.compiler.schedules import Work
from resihp.ir.model import Op

__all__ = ["ItemCosts", "Orders", "fits", "planned_of", "replay", "representatives", "stage_ends"]

Orders = Mapping[int, Sequence[Sequence[tuple[Op, int, int]]]]
"""Per replica and stage, as in `Planned.orders`."""
ItemCosts = Callable[[int, int, Item], Chunks]
"""Ticks of a micro-batch at (replica, stage), where micro-batches differ."""

_Tensor = tuple[bool, int, int, int]
"""(is a gradient, stage that makes it, home, number)"""


def replay(problem: Problem, planned: Planned, costs: ItemCosts | None = None) -> int | None:
    """Ticks until the last worker ends when all keep to the orders of `planned`.

    `problem` has the true costs. None where workers wait for each other; orders that came of one
    play never do.
    """
    ends = stage_ends(problem, planned, costs)
    return None if ends is None else max(ends, default=0)


def stage_ends(
    problem: Problem, planned: Planned, costs: ItemCosts | None = None
) -> tuple[int, ...] | None:
    """The same for the last worker of each stage."""
    return _Replay(problem, planned.orders, representatives(problem, planned), costs).run()


def planned_of(problem: Problem, orders: Sequence[Sequence[Work]]) -> Planned | None:
    """Orders of a schedule with one stage per position, the same in all replicas.

    None where they do not fit into memory.
    """
    order = tuple(tuple((work.op, -1, work.microbatch) for work in works) for works in orders)
    planned = Planned(0, dict.fromkeys(range(len(problem.replicas)), order), {}, complete=True)
    if not fits(problem, planned):
        return None
    makespan = replay(problem, planned)
    assert makespan is not None, "the orders of a schedule go on at any costs"
    return planned._replace(makespan=makespan)


def fits(problem: Problem, planned: Planned) -> bool:
    """Whether no worker of `planned` ever holds more than it has room for."""
    return all(
        _peak(sizes, order) <= sizes.free
        for replica in representatives(problem, planned)
        for sizes, order in zip(
            problem.replicas[replica].memory, planned.orders[replica], strict=True
        )
        if sizes is not None
    )


def _peak(sizes: Capacity, order: Sequence[tuple[Op, int, int]]) -> int:
    """Most bytes in use at once."""
    live = peak = 0
    for op, _, _ in order:
        if op is Op.F:
            live += sizes.activation
            peak = max(peak, live)
        elif op is Op.W:
            live -= sizes.activation - sizes.released + sizes.held
        else:
            peak = max(peak, live + sizes.held)
            live += sizes.held - sizes.released if op is Op.B else -sizes.activation
    return peak


def representatives(problem: Problem, planned: Planned) -> list[int]:
    """Replicas that are enough to look at: one of those with equal rows, orders and no guests."""
    apart = {home for home, _ in planned.placing}
    apart.update(taker for stages in planned.placing.values() for taker in stages.values())
    firsts: dict[object, int] = {}
    for replica, order in planned.orders.items():
        key = replica if replica in apart else (id(order), problem.replicas[replica])
        firsts.setdefault(key, replica)
    return list(firsts.values())


class _Replay:
    """Each worker runs until its next input is not there; whoever makes that wakes it."""

    def __init__(
        self,
        problem: Problem,
        orders: Orders,
        replicas: Sequence[int],
        costs: ItemCosts | None,
    ) -> None:
        self.problem = problem
        self.costs = costs
        self.orders = {(d, s): order for d in replicas for s, order in enumerate(orders[d])}
        self.next = dict.fromkeys(self.orders, 0)
        self.clock = dict.fromkeys(self.orders, 0)
        self.made: dict[_Tensor, tuple[int, int]] = {}
        """When, and by which replica."""
        self.waiting: dict[_Tensor, tuple[int, int]] = {}
        self.ready = deque(self.orders)

    def run(self) -> tuple[int, ...] | None:
        """When each stage ends; None where workers wait for each other."""
        while self.ready:
            self._advance(*self.ready.popleft())
        if any(self.next[worker] < len(order) for worker, order in self.orders.items()):
            return None
        ends = [0] * self.problem.num_stages
        for (_, stage), time in self.clock.items():
            ends[stage] = max(ends[stage], time)
        return tuple(ends)

    def _advance(self, replica: int, stage: int) -> None:
        worker = replica, stage
        order, index, clock = self.orders[worker], self.next[worker], self.clock[worker]
        last = self.problem.num_stages - 1
        row = self.problem.replicas[replica]
        while index < len(order):
            op, home, number = order[index]
            home = replica if home < 0 else home
            if op is not Op.W and stage != (0 if op is Op.F else last):
                is_grad = op is not Op.F
                before = stage + 1 if is_grad else stage - 1
                tensor = (is_grad, before, home, number)
                if tensor not in self.made:
                    self.waiting[tensor] = worker
                    break
                time, maker = self.made[tensor]
                hops = row.edges if maker == replica else self.problem.crossing
                clock = max(clock, time + hops[min(stage, before)])
            clock += self._ticks(replica, stage, op, (home, number))
            index += 1
            if op is not Op.W:
                made = (op is not Op.F, stage, home, number)
                self.made[made] = clock, replica
                if made in self.waiting:
                    self.ready.append(self.waiting.pop(made))
        self.next[worker], self.clock[worker] = index, clock

    def _ticks(self, replica: int, stage: int, op: Op, item: Item) -> int:
        chunks = (
            self.problem.replicas[replica].chunks[stage]
            if self.costs is None
            else self.costs(replica, stage, item)
        )
        assert chunks is not None, f"replica {replica} has no stage {stage}"
        if op is Op.BW:
            return chunks.backward_input + chunks.backward_weight
        return chunks[op]
