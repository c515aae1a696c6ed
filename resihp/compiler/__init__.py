"""From descriptions to plans: schedules, lowering, the healthy plan, sizes, prices, adaptation.

Everything here is pure: plans in, plans out, no torch, no clock, no files. The planner is large and
loads with `resihp.compiler.adapt` only.
"""

from __future__ import annotations

from resihp.compiler.facts import facts_of
from resihp.compiler.layout import initial_plan, split_layers
from resihp.compiler.lower import lower
from resihp.compiler.schedules import SCHEDULES, Work, schedule_order
from resihp.compiler.work import home_work, ordered, spread_work

__all__ = [
    "SCHEDULES",
    "Work",
    "facts_of",
    "home_work",
    "initial_plan",
    "lower",
    "ordered",
    "schedule_order",
    "split_layers",
    "spread_work",
]
