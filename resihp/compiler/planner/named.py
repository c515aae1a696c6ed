"""Orders of the named schedules as plans: where little is wrong they are hard to beat."""

from __future__ import annotations

from collections.abc import Iterator

from resihp.compiler.planner.effort import num_chunks
from resihp.compiler.planner.planned import Planned
from resihp.compiler.planner.problem import Problem
from resihp.compiler.planner.replay import planned_of, stage_ends
from resihp.compiler.schedules import ONE_STAGE, schedule_order
from resihp.ir.model import Op

__all__ = ["named_plans"]


def named_plans(problem: Problem, budget: int) -> Iterator[Planned]:
    """Those with one stage per position that fit into memory; nothing moves.

    Only where no replica lacks a stage, and a play costs at most `budget` chunks of work.
    """
    is_whole = all(chunks is not None for row in problem.replicas for chunks in row.chunks)
    if not is_whole or not problem.num_stages or num_chunks(problem) > budget:
        return
    for kind in ONE_STAGE:
        orders = schedule_order(kind, problem.num_stages, problem.num_microbatches)
        if problem.split == any(work.op is Op.BW for work in orders[0]):
            continue
        planned = planned_of(problem, orders)
        ends = None if planned is None else stage_ends(problem, planned)
        if planned is not None and ends is not None:
            yield planned._replace(ends=ends)
