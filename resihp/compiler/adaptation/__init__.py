"""From a plan and what has become of its devices to the best plan for what is left."""

from __future__ import annotations

from resihp.compiler.adaptation.layouts import Layout
from resihp.compiler.adaptation.problems import TICK_S, problem_of
from resihp.compiler.adaptation.situation import (
    ANYTHING,
    WHOLE_MICROBATCHES,
    Profile,
    Situation,
)

__all__ = [
    "ANYTHING",
    "TICK_S",
    "WHOLE_MICROBATCHES",
    "Layout",
    "Profile",
    "Situation",
    "problem_of",
]
