"""The paper's Scheduler to the letter (section 6), without guard, portfolio or second thoughts.

TP groups by Eq. 3 and 4, layers moved away from slow stages, then Algorithm 1 as printed: at
each step one micro-batch of a stage moves. A lost worker's queue is given out beforehand, which
the printed rule does when its turn comes.
"""

from __future__ import annotations

from resihp.compiler.adaptation import Layout, Situation, problem_of
from resihp.compiler.adaptation.candidates import Candidate, candidates
from resihp.compiler.planner.algorithm1 import progress_rule
from resihp.compiler.planner.balance import homeless_placed
from resihp.compiler.planner.engine import Engine
from resihp.compiler.policies.outcome import Outcome
from resihp.compiler.policies.whole_groups import ONE_STAGE_ONLY, emitted, unchanged
from resihp.compiler.sources import require_state

__all__ = ["literal"]

_NAME = "resihp-literal"
_DELTA = 0
"""That of the paper's example, figure 6b; it gives no other value."""


def literal(situation: Situation) -> Outcome:
    """Raises NoFeasiblePlan where state is gone, or no choice of members holds every layer."""
    if not situation.has_one_stage_each:
        return unchanged(situation, _NAME, ONE_STAGE_ONLY)
    require_state(situation.state)
    found = candidates(situation.with_min_holders(1))
    layout = _as_printed(found)
    problem = problem_of(situation, layout)
    rule = progress_rule(_DELTA, guarded=False)
    planned = Engine(problem, homeless_placed(problem), rule).run()
    return emitted(situation, layout, planned, _NAME, f"{planned.num_moved} chunks migrate")


def _as_printed(found: list[Candidate]) -> Layout:
    """Members by Eq. 4 and layers by the slowest replica, or the nearest to that."""

    def distance(candidate: Candidate) -> tuple[bool, bool]:
        return candidate.tp not in (None, "fastest"), candidate.pp != "slowest replica"

    return min(found, key=distance).layout
