"""A search from the best plan so far by small random changes, played one after the other.

A change puts stages of some micro-batches on other replicas, or lets workers follow whims. A plan
that is a little longer than the best may be gone on from, on the way to a shorter one; how much
falls from a few percent to nothing, over and over, each time from the best (threshold accepting,
Dueck and Scheuer 1990).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.planned import Item, Planned, Style
from resihp.compiler.planner.problem import Problem

__all__ = ["climb"]

_ROUND = 60
"""Tries from one return to the best to the next."""
_DETOUR = 0.03
"""Share by which a plan may be longer than the best at the begin of a round."""
_WHIMS = (0.05, 0.2, 0.4)

_Where = dict[Item, dict[int, int]]


def climb(
    problem: Problem,
    best: Planned,
    bounds: Sequence[tuple[int, ...] | None],
    styles: Sequence[Style],
    tries: int,
    floor: int,
) -> Planned:
    """The shortest complete plan of `tries` plays from `best`; fewer once it is down to `floor`."""
    rng = random.Random(problem.num_microbatches)
    changes = _Changes(problem, rng)
    current = best
    for index in range(tries):
        if best.makespan <= floor:
            break
        if index % _ROUND == 0:
            current = best
        placing, style = current.placing, rng.choice(styles)
        if changes.are_possible and rng.random() < 0.6:
            placing = changes.of(placing)
        else:
            style = style._replace(whim=rng.choice(_WHIMS), seed=index)
        bound = rng.choice(bounds)
        detour = _DETOUR * (1 - index % _ROUND / _ROUND)
        engine = Engine(problem._replace(in_flight=bound), placing, style=style)
        other = engine.run_within(int(best.makespan * (1 + detour)))
        if other is not None and other.complete:
            current = other
        if current.makespan < best.makespan:
            best = current
    return best


class _Changes:
    """Random changes of placings."""

    def __init__(self, problem: Problem, rng: random.Random) -> None:
        self._num_replicas = len(problem.replicas)
        self._num_microbatches = problem.num_microbatches
        self._num_stages = problem.num_stages
        self._rng = rng
        self._holders = [
            [d for d, row in enumerate(problem.replicas) if row.chunks[stage] is not None]
            for stage in range(problem.num_stages)
        ]
        self._shared = [stage for stage, found in enumerate(self._holders) if len(found) > 1]

    @property
    def are_possible(self) -> bool:
        """Whether some stage has two replicas."""
        return bool(self._shared)

    def of(self, placing: _Where) -> _Where:
        """A copy of `placing` with one change, large or small."""
        rng = self._rng
        changed = {item: dict(where) for item, where in placing.items()}
        stage = rng.choice(self._shared)
        replica = rng.choice(self._holders[stage])
        kind = rng.random()
        if kind < 0.4:
            self._put(changed, self._item(), stage, replica)
        elif kind < 0.65:
            self._swap(changed, self._item(), self._item(), stage)
        elif kind < 0.85:
            item = self._item()
            for later in range(stage, self._num_stages):
                if replica in self._holders[later]:
                    self._put(changed, item, later, replica)
        else:
            home = rng.randrange(self._num_replicas)
            for number in range(rng.randrange(self._num_microbatches), self._num_microbatches):
                self._put(changed, (home, number), stage, replica)
        return changed

    def _item(self) -> Item:
        return self._rng.randrange(self._num_replicas), self._rng.randrange(self._num_microbatches)

    def _swap(self, placing: _Where, one: Item, other: Item, stage: int) -> None:
        here = placing.get(one, {}).get(stage, one[0])
        there = placing.get(other, {}).get(stage, other[0])
        self._put(placing, one, stage, there)
        self._put(placing, other, stage, here)

    def _put(self, placing: _Where, item: Item, stage: int, replica: int) -> None:
        where = placing.setdefault(item, {})
        if replica == item[0]:
            where.pop(stage, None)
        else:
            where[stage] = replica
        if not where:
            del placing[item]
