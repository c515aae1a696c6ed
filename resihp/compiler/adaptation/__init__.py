"""From a plan and what has become of its devices to the best plan for what is left."""

from __future__ import annotations

from resihp.compiler.adaptation.decision import Considered, Decision
from resihp.compiler.adaptation.hysteresis import Patience, Trust, Verdict
from resihp.compiler.adaptation.layouts import Layout
from resihp.compiler.adaptation.portfolio import DEFAULT_BUDGET, UNCHANGED, adapt
from resihp.compiler.adaptation.problems import TICK_S, problem_of
from resihp.compiler.adaptation.redone import redone
from resihp.compiler.adaptation.rejoin import Growth, grow_back
from resihp.compiler.adaptation.situation import (
    ANYTHING,
    WHOLE_MICROBATCHES,
    Profile,
    Situation,
)

__all__ = [
    "ANYTHING",
    "DEFAULT_BUDGET",
    "TICK_S",
    "UNCHANGED",
    "WHOLE_MICROBATCHES",
    "Considered",
    "Decision",
    "Growth",
    "Layout",
    "Patience",
    "Profile",
    "Situation",
    "Trust",
    "Verdict",
    "adapt",
    "grow_back",
    "problem_of",
    "redone",
]
