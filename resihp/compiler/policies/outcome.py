"""What a policy makes of a situation."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from resihp.compiler.adaptation import Situation
from resihp.ir.model import Plan

__all__ = ["Outcome", "Policy"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """An iteration under a policy."""

    name: str
    """Of the policy."""
    iteration_s: float | None
    """Simulated seconds; None where the policy has no answer and the job stops."""
    plan: Plan | None
    """The plan that was simulated; None also where the plan language cannot say it."""
    note: str
    """What was done, or why nothing could be."""

    @classmethod
    def stops(cls, name: str, why: str) -> Outcome:
        """The job cannot go on."""
        return cls(name=name, iteration_s=None, plan=None, note=why)


Policy = Callable[[Situation], Outcome]
