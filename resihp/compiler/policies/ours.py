"""What this project does: `resihp.compiler.adaptation.adapt`."""

from __future__ import annotations

from resihp.compiler.adaptation import Situation, adapt
from resihp.compiler.policies.outcome import Outcome

__all__ = ["ours"]


def ours(situation: Situation) -> Outcome:
    """The decision of the portfolio by time alone, as the others decide. Raises NoFeasiblePlan."""
    decision = adapt(situation.with_min_holders(1))
    return Outcome(
        name="resihp", iteration_s=decision.iteration_s, plan=decision.plan, note=decision.chosen
    )
