"""Adaptra (PipeMorph, arXiv 2504.19232): orders with more warm-up where a link is slow.

Nothing moves and slow compute is left as it is; see `resihp.compiler.planner.warmup` for the rule.
"""

from __future__ import annotations

from resihp.compiler.adaptation import Situation
from resihp.compiler.adaptation.layouts import kept_layout
from resihp.compiler.planner.warmup import best_order_for_delays
from resihp.compiler.policies.outcome import Outcome
from resihp.compiler.policies.whole_groups import (
    ONE_STAGE_ONLY,
    emitted,
    no_answer_to_lost,
    priced,
    unchanged,
)

__all__ = ["adaptra"]

_NAME = "adaptra"


def adaptra(situation: Situation) -> Outcome:
    """The best order for the delays of today, B and W apart; stops when a rank is lost."""
    layout = kept_layout(situation)
    if layout is None:
        return no_answer_to_lost(situation, _NAME)
    problem = priced(situation, layout)
    if problem is None:
        return unchanged(situation, _NAME, ONE_STAGE_ONLY)
    planned = best_order_for_delays(problem._replace(split=True))
    return emitted(situation, layout, planned, _NAME, "orders for the delays of today")
