"""What of the plan language this executor runs. The rest is refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from resihp.errors import UserError
from resihp.ir.model import Level, Plan

__all__ = ["check_runnable"]


def check_runnable(plan: Plan) -> None:
    """Raise `UserError` if `plan` needs what this executor cannot do yet."""
    reason = next(_reasons(plan), None)
    if reason is not None:
        raise UserError(f"this executor does not run such plans yet: {reason}")


def _reasons(plan: Plan) -> Iterator[str]:
    if plan.level is not Level.PLAN:
        yield f"it is a {plan.level}, which `resihp lower` makes a plan"
