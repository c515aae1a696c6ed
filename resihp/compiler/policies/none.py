"""No reaction: the plan before goes on, as slow as it has become, until a rank of it is lost."""

from __future__ import annotations

from resihp.compiler.adaptation import Situation
from resihp.compiler.policies.outcome import Outcome
from resihp.compiler.policies.whole_groups import unchanged

__all__ = ["none"]


def none(situation: Situation) -> Outcome:
    """The plan before."""
    return unchanged(situation, "none")
