"""What of the plan language this executor runs. The rest is refused before anything starts."""

from __future__ import annotations

from resihp.errors import UserError
from resihp.ir.model import Level, Plan

__all__ = ["check_runnable"]


def check_runnable(plan: Plan) -> None:
    """Raise `UserError` if `plan` needs what this executor cannot do yet."""
    if plan.level is not Level.PLAN:
        raise UserError(
            f"this executor does not run such plans yet: it is a {plan.level}, which "
            "`resihp lower` makes a plan"
        )
