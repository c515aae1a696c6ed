"""Greyhound (USENIX ATC 2025, arXiv 2410.12588), strategy S2: fewer micro-batches where it is slow.

The time of a replica is that of its slowest stage. The numbers m_d of micro-batches minimise the
variance of m_d * t_d, each at least 1, their sum unchanged. Whole micro-batches move, so that the
fast stages of a slow replica idle. Swaps of nodes (S3) and restarts (S4) are left out: they cost a
minute or more.
"""

from __future__ import annotations

from resihp.compiler.adaptation import Situation
from resihp.compiler.adaptation.layouts import kept_layout
from resihp.compiler.planner.carriers import carriers_of, round_robin
from resihp.compiler.policies.outcome import Outcome
from resihp.compiler.policies.whole_groups import (
    ONE_STAGE_ONLY,
    best_play,
    emitted,
    no_answer_to_lost,
    priced,
    unchanged,
)

__all__ = ["greyhound"]

_NAME = "greyhound"


def greyhound(situation: Situation) -> Outcome:
    """Micro-batches by the speed of replicas; stops when a rank is lost."""
    layout = kept_layout(situation)
    if layout is None:
        return no_answer_to_lost(situation, _NAME)
    problem = priced(situation, layout)
    if problem is None:
        return unchanged(situation, _NAME, ONE_STAGE_ONLY)
    carriers = carriers_of(problem)
    if not carriers:
        return unchanged(situation, _NAME)
    planned = best_play(problem, round_robin(problem, carriers))
    return emitted(situation, layout, planned, _NAME, f"{len(carriers)} micro-batches move")
