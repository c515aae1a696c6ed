"""A candidate with what is known of it so far: its bound, its best plan, its simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from resihp.compiler.adaptation.candidates import Candidate
from resihp.compiler.adaptation.decision import Considered
from resihp.compiler.adaptation.layouts import Layout
from resihp.compiler.adaptation.planning import num_homeless
from resihp.compiler.adaptation.problems import TICK_S, problem_of, splits_backward
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.planner.engine import Planned
from resihp.compiler.planner.lower_bound import stage_bounds
from resihp.compiler.planner.problem import Problem, total
from resihp.ir.model import Group

__all__ = ["Entry"]


class _Ends(NamedTuple):
    """Seconds after the last compute of each stage: its gradients are reduced, then all step."""

    reduce_s: list[float]
    step_s: float

    @property
    def most_s(self) -> float:
        """Of the slowest reduction."""
        return max(self.reduce_s) + self.step_s

    @property
    def least_s(self) -> float:
        """Of the fastest reduction."""
        return min(self.reduce_s) + self.step_s

    def after(self, ticks: Sequence[int]) -> float:
        """Seconds until the step is over where each stage computes for some ticks."""
        pairs = zip(ticks, self.reduce_s, strict=True)
        return max(each * TICK_S + reduce_s for each, reduce_s in pairs) + self.step_s


class Entry:
    """A layout on which micro-batches may move (`moves`) or stay where they can."""

    def __init__(self, candidate: Candidate, problem: Problem, ends: _Ends, bound_s: float) -> None:
        self.candidate = candidate
        self.problem = problem
        self.ends = ends
        self.bound_s = bound_s
        """No plan takes less."""
        self.moves = True
        self.splits = False
        """Whether B and W come apart that were one before."""
        self.planned: Planned | None = None
        self.iteration_s: float | None = None
        self.why = ""
        self.is_lowered = False
        """Whether its plan was made and simulated, or found to lack memory."""
        self.lowered_from: Planned | None = None
        """What the first of its plans was made of."""
        self.given_up_s = 0.0
        """What a play of it was found to take at least when it was given up."""

    @classmethod
    def of(cls, situation: Situation, candidate: Candidate) -> list[Entry]:
        """Those of one candidate: B and W apart or as before, micro-batches that move or stay."""
        problem, ends = problem_of(situation, candidate.layout), _ends(situation, candidate.layout)
        found: list[Entry] = []
        as_before = problem._replace(split=splits_backward(situation.previous))
        for each in dict.fromkeys((problem, as_before)):
            bounds = stage_bounds(each)
            free = cls(candidate, each, ends, ends.after(bounds))
            at_home = ends.after(list(map(max, bounds, _loads_at_home(each))))
            fixed = cls(candidate, each, ends, at_home)
            fixed.moves = False
            free.splits = fixed.splits = each.split and not as_before.split
            found += [free, fixed] if len(each.replicas) > 1 else [fixed]
        return found

    @property
    def is_over(self) -> bool:
        """Whether it was tried to the end, or there is no plan for it."""
        return self.is_lowered or (self.planned is not None and not self.planned.complete)

    def offer(self, planned: Planned) -> None:
        """Take `planned` where it is better than what is known."""
        before, before_s = self.planned, self.makespan_s
        self.planned = planned
        if before is not None and (self.makespan_s or inf) >= (before_s or inf):
            self.planned = before

    @property
    def makespan_s(self) -> float | None:
        """What the planner predicts: each stage is reduced once its compute ends, then all step.

        None where there is no complete plan.
        """
        if self.planned is None or not self.planned.complete:
            return None
        if not self.planned.ends:
            return self.planned.makespan * TICK_S + self.ends.most_s
        return self.ends.after(self.planned.ends)

    @property
    def least_s(self) -> float:
        """What the plan takes at least; where there is none, what any takes or the last one did."""
        if self.planned is None or not self.planned.complete:
            return max(self.bound_s, self.given_up_s)
        if self.planned.ends:
            return self.ends.after(self.planned.ends)
        return max(self.bound_s, self.planned.makespan * TICK_S + self.ends.least_s)

    @property
    def name(self) -> str:
        """All that it changes."""
        changes = self.candidate.changes
        if self.splits:
            changes.append("B and W apart")
        num_moved = 0 if self.planned is None else self.planned.num_moved
        if (self.planned is None and self.moves) or num_moved > num_homeless(self.problem):
            changes.append("DP")
        elif num_homeless(self.problem):
            changes.append("DP (only what must move)")
        return " + ".join(changes) or "reordered"

    def considered(self, situation: Situation) -> Considered:
        """What a decision tells of it."""
        return Considered(
            name=self.name,
            num_groups_changed=self.candidate.num_changed(situation),
            bound_s=self.bound_s,
            makespan_s=self.makespan_s,
            iteration_s=self.iteration_s,
            num_moved=None if self.planned is None else self.planned.num_moved,
            is_played=self.planned is not None,
            why=self.why,
        )


def _loads_at_home(problem: Problem) -> list[int]:
    """Ticks of the most loaded worker of each stage where nothing moves."""
    rows = set(problem.replicas)
    return [
        problem.num_microbatches * max(total(c) for row in rows if (c := row.chunks[s]) is not None)
        for s in range(problem.num_stages)
    ]


def _ends(situation: Situation, layout: Layout) -> _Ends:
    holders: list[list[Group]] = [[] for _ in range(situation.placement.num_stages)]
    for group in layout.groups:
        holders[group.pp].append(group)
    pricing = situation.pricing
    busy = pricing.busy(layout.groups)
    reduce_s = [pricing.reduce_s(groups, groups[0].sole_layers, busy) for groups in holders]
    fewest = (min(groups, key=lambda group: group.tp) for groups in holders)
    return _Ends(reduce_s, max(map(pricing.step_s, fewest)))
