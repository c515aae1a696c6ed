"""ReCycle strengthened by Greyhound (section 8.1 of the paper): shares by speed, then rerouting.

Replicas first get micro-batches by the speed of their slowest live stage; then what lost workers
would have run goes to their peers round robin, slow or not.
"""

from __future__ import annotations

from resihp.compiler.adaptation import Situation
from resihp.compiler.planner.carriers import carriers_of, round_robin
from resihp.compiler.policies.outcome import Outcome
from resihp.compiler.policies.whole_groups import (
    ONE_STAGE_ONLY,
    best_play,
    emitted,
    left_of,
    priced,
    unchanged,
)

__all__ = ["recycle_greyhound"]

_NAME = "recycle+greyhound"


def recycle_greyhound(situation: Situation) -> Outcome:
    """Both, one after the other."""
    layout = left_of(situation)
    if layout is None:
        return Outcome.stops(_NAME, "a stage is lost in every replica")
    problem = priced(situation, layout)
    if problem is None:
        return unchanged(situation, _NAME, ONE_STAGE_ONLY)
    carriers = carriers_of(problem)
    is_whole = len(layout.groups) == len(situation.previous.groups)
    if is_whole and not carriers:
        return unchanged(situation, _NAME)
    problem = problem if is_whole else problem._replace(split=True)
    planned = best_play(problem, round_robin(problem, carriers))
    return emitted(situation, layout, planned, _NAME, f"{len(carriers)} micro-batches move first")
