"""ReCycle (SOSP 2024, arXiv 2405.14009): peers of a dead worker run its micro-batches.

Peers of the same stage hold the same parameters. A dead worker's micro-batches go to them round
robin, all other stages stay in their home pipeline, and B and W are decoupled so that the foreign
work fills bubbles. How fast a peer is has no part in it. ReCycle's stages also step apart from
each other, so that the bubbles of one iteration join the next; steps here are global, as gradient
clipping needs, and that is left out.
"""

from __future__ import annotations

from resihp.compiler.adaptation import Situation
from resihp.compiler.planner.carriers import round_robin
from resihp.compiler.policies.outcome import Outcome
from resihp.compiler.policies.whole_groups import (
    ONE_STAGE_ONLY,
    best_play,
    emitted,
    left_of,
    priced,
    unchanged,
)

__all__ = ["recycle"]

_NAME = "recycle"


def recycle(situation: Situation) -> Outcome:
    """Micro-batches of lost groups go to their peers; slow ones are left as they are."""
    if situation.lost.isdisjoint(situation.previous.active_ranks):
        return unchanged(situation, _NAME)
    layout = left_of(situation)
    if layout is None:
        return Outcome.stops(_NAME, "a stage is lost in every replica")
    problem = priced(situation, layout)
    if problem is None:
        return unchanged(situation, _NAME, ONE_STAGE_ONLY)
    problem = problem._replace(split=True)
    planned = best_play(problem, round_robin(problem, {}))
    return emitted(situation, layout, planned, _NAME, "peers run what is lost, round robin")
