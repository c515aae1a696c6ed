"""What a play costs, known beforehand: budgets are in chunks of work, not in seconds.

So the same problem always gives the same plan.
"""

from __future__ import annotations

from resihp.compiler.planner.planned import Placing
from resihp.compiler.planner.problem import Problem

__all__ = ["num_chunks"]


def num_chunks(problem: Problem, placing: Placing | None = None) -> int:
    """About how many chunks of work are played.

    Replicas that are alike are played once, those who give or take micro-batches one by one.
    """
    apart = {home for home, _ in placing or ()}
    for stages in (placing or {}).values():
        apart.update(stages.values())
    distinct = {row for d, row in enumerate(problem.replicas) if d not in apart}
    return 3 * (len(apart) + len(distinct)) * problem.num_stages * problem.num_microbatches
