"""What a search moved and need not have: exchanges are undone, and moves that do not pay.

Random changes leave plans in which A runs micro-batches of B at a stage where B runs some of A's.
Each change back is played, first with the rest of the order as it is, then from the start in some
ways, and kept where the plan is no longer for it and, if it is as long, no stage ends later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.planned import Item, Planned, Style
from resihp.compiler.planner.problem import Problem
from resihp.compiler.planner.replay import fits, representatives, stage_ends
from resihp.compiler.planner.undo import at_home, swapped

__all__ = ["Ways", "exchanges", "tidied"]


class Ways(NamedTuple):
    """How changed placings are played."""

    bounds: Sequence[tuple[int, ...] | None]
    styles: Sequence[Style]


_Exchange = tuple[Item, Item, tuple[int, ...]]
"""Two micro-batches, each run by the home of the other, and stages at which they are."""


def tidied(problem: Problem, planned: Planned, ways: Ways, budget: int) -> tuple[Planned, int]:
    """`planned` with fewer moved chunks and no longer, and how many plans were played.

    Of work about `budget` chunks are played, but one change where anything is exchanged.
    """
    tidy = _Tidy(problem, planned, ways, budget)
    while tidy.left > 0 and (tidy.exchanges_undone() or tidy.moves_undone()):
        pass
    return tidy.planned, tidy.num_played


class _Tidy:
    """Tries changes of one plan as long as there is a budget."""

    def __init__(self, problem: Problem, planned: Planned, ways: Ways, budget: int) -> None:
        self.problem = problem
        self.planned = planned
        self.ways = ways
        self.num_played = 0
        self.left = 0
        """Plays."""
        self._ends: tuple[int, ...] = ()
        if planned.complete and _movable(problem, planned):
            rows = (planned.orders[each] for each in representatives(problem, planned))
            cost = sum(len(order) for row in rows for order in row)
            self.left = max(budget // cost, 2 * bool(_matched(planned)))
        if self.left > 0:
            ends = self._replayed(planned)
            assert ends is not None, "what was played goes on"
            self._ends = ends

    def exchanges_undone(self) -> bool:
        """Undo what can be: all at once, or pair by pair; whether anything was."""
        pairs = _matched(self.planned)
        if not pairs:
            return False
        every = self.planned
        for pair in pairs:
            every = swapped(every, *pair)
        if self._is_taken(every):
            return True
        found = False
        for one, other, stages in exchanges(self.planned):
            for some in dict.fromkeys([stages, *((stage,) for stage in stages)]):
                if self.left > 0 and set(some) <= set(_common(self.planned, one, other)):
                    found |= self._is_taken(swapped(self.planned, one, other, some))
        return found

    def moves_undone(self) -> bool:
        """Let micro-batches run at home again, at all stages or at single ones; whether any do."""
        found = False
        for item, stages in _movable(self.problem, self.planned).items():
            for some in dict.fromkeys([stages, *((stage,) for stage in stages)]):
                if self.left > 0 and set(some) <= self.planned.placing.get(item, {}).keys():
                    found |= self._is_taken(at_home(self.planned, item, some))
        return found

    def _is_taken(self, other: Planned) -> bool:
        """Take `other` as it is, or a play of its placing, if that is as good."""
        return self._is_as_good(other) or any(
            self._play_is_as_good(other, bound, style)
            for style, bound in product(self.ways.styles, self.ways.bounds)
        )

    def _is_as_good(self, other: Planned) -> bool:
        ends = self._replayed(other) if self.left > 0 else None
        if ends is None or any(map(int.__gt__, ends, self._ends)) or not fits(self.problem, other):
            return False
        self.planned, self._ends = other._replace(makespan=max(ends), ends=ends), ends
        return True

    def _play_is_as_good(self, other: Planned, bound: tuple[int, ...] | None, style: Style) -> bool:
        if self.left <= 0:
            return False
        self._count()
        problem = self.problem._replace(in_flight=bound)
        before = self.planned.makespan
        played = Engine(problem, other.placing, style=style).run_within(before)
        if played is None or not played.complete:
            return False
        if played.makespan == before and any(map(int.__gt__, played.ends, self._ends)):
            return False
        self.planned, self._ends = played, played.ends
        return True

    def _replayed(self, planned: Planned) -> tuple[int, ...] | None:
        self._count()
        return stage_ends(self.problem, planned)

    def _count(self) -> None:
        self.left -= 1
        self.num_played += 1


def exchanges(planned: Planned) -> Iterator[_Exchange]:
    """All pairs of micro-batches that run at each other's home, with the stages where they do."""
    away: dict[tuple[int, int], list[Item]] = {}
    for item, where in sorted(planned.placing.items()):
        for taker in dict.fromkeys(where.values()):
            away.setdefault((item[0], taker), []).append(item)
    for (home, taker), items in away.items():
        for one, other in product(items, away.get((taker, home), ()) if home < taker else ()):
            stages = _common(planned, one, other)
            if stages:
                yield one, other, stages


def _common(planned: Planned, one: Item, other: Item) -> tuple[int, ...]:
    here, there = planned.placing.get(one, {}), planned.placing.get(other, {})
    return tuple(
        stage
        for stage, taker in sorted(here.items())
        if taker == other[0] and there.get(stage) == one[0]
    )


def _matched(planned: Planned) -> list[_Exchange]:
    """Exchanges that can be undone together: each micro-batch once at a stage."""
    away: dict[tuple[int, int, int], list[Item]] = {}
    for item, where in sorted(planned.placing.items()):
        for stage, taker in where.items():
            away.setdefault((stage, item[0], taker), []).append(item)
    return [
        (one, other, (stage,))
        for (stage, home, taker), items in away.items()
        if home < taker
        for one, other in zip(items, away.get((stage, taker, home), ()), strict=False)
    ]


def _movable(problem: Problem, planned: Planned) -> dict[Item, tuple[int, ...]]:
    """Micro-batches that run elsewhere at stages that their home has."""
    found = {
        item: tuple(s for s in sorted(where) if problem.replicas[item[0]].chunks[s] is not None)
        for item, where in sorted(planned.placing.items())
    }
    return {item: stages for item, stages in found.items() if stages}
