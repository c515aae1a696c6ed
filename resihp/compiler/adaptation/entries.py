"""A candidate with what is known of it so far: its bound, its best plan, its simulated time."""

from __future__ import annotations

from resihp.compiler.adaptation.candidates import Candidate
from resihp.compiler.adaptation.decision import Considered
from resihp.compiler.adaptation.layouts import Layout
from resihp.compiler.adaptation.planning import num_homeless
from resihp.compiler.adaptation.problems import TICK_S, problem_of
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.planner.engine import Planned
from resihp.compiler.planner.lower_bound import lower_bound
from resihp.compiler.planner.problem import Problem, total
from resihp.ir.model import Group

__all__ = ["Entry"]


class Entry:
    """A layout on which micro-batches may move (`moves`) or stay where they can."""

    def __init__(
        self, situation: Situation, candidate: Candidate, problem: Problem, *, moves: bool
    ) -> None:
        self.candidate = candidate
        self.problem = problem
        self.moves = moves
        self.end_s = _end_s(situation, candidate.layout)
        """Seconds after the last worker's compute: gradients are reduced, then all step."""
        at_home = 0 if moves else _longest_at_home(problem)
        self.bound_s = max(lower_bound(problem), at_home) * TICK_S + self.end_s
        self.planned: Planned | None = None
        self.iteration_s: float | None = None
        self.why = ""

    @classmethod
    def pair(cls, situation: Situation, candidate: Candidate) -> list[Entry]:
        """Both of one candidate, or one where there is no choice."""
        problem = problem_of(situation, candidate.layout)
        can_move = len(problem.replicas) > 1
        return [
            cls(situation, candidate, problem, moves=moves)
            for moves in ((True, False) if can_move else (False,))
        ]

    @property
    def makespan_s(self) -> float | None:
        """What the planner predicts; None where there is no complete plan."""
        if self.planned is None or not self.planned.complete:
            return None
        return self.planned.makespan * TICK_S + self.end_s

    @property
    def name(self) -> str:
        """All that it changes."""
        changes = self.candidate.changes
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
            why=self.why,
        )


def _longest_at_home(problem: Problem) -> int:
    """Ticks of the most loaded worker where nothing moves."""
    costs = (total(c) for row in set(problem.replicas) for c in row.chunks if c is not None)
    return problem.num_microbatches * max(costs)


def _end_s(situation: Situation, layout: Layout) -> float:
    """The longest reduction of a stage's gradients, and the longest step."""
    holders: dict[int, list[Group]] = {}
    for group in layout.groups:
        holders.setdefault(group.pp, []).append(group)
    pricing = situation.pricing
    reduce_s = max(
        pricing.reduce_s(groups, layers)
        for groups in holders.values()
        for layers in groups[0].layers
    )
    fewest = (min(groups, key=lambda group: group.tp) for groups in holders.values())
    return reduce_s + max(map(pricing.step_s, fewest))
