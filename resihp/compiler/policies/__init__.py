"""What to do about failures, by name: ours, the published systems, and nothing.

All are given the same situation and timed by the same player. `resihp.compiler.policies.outcome`
is the interface.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from resihp.compiler.adaptation import Situation
from resihp.compiler.policies.adaptra import adaptra
from resihp.compiler.policies.greyhound import greyhound
from resihp.compiler.policies.literal import literal
from resihp.compiler.policies.none import none
from resihp.compiler.policies.oobleck import oobleck, oobleck_greyhound
from resihp.compiler.policies.ours import ours
from resihp.compiler.policies.outcome import Outcome, Policy
from resihp.compiler.policies.recycle import recycle
from resihp.compiler.policies.recycle_greyhound import recycle_greyhound
from resihp.errors import NoFeasiblePlan, UserError

__all__ = ["POLICIES", "Outcome", "Policy", "find_policies", "outcomes"]

POLICIES: Mapping[str, Policy] = {
    "none": none,
    "recycle": recycle,
    "oobleck": oobleck,
    "greyhound": greyhound,
    "adaptra": adaptra,
    "recycle+greyhound": recycle_greyhound,
    "oobleck+greyhound": oobleck_greyhound,
    "resihp-literal": literal,
    "resihp": ours,
}
"""By name, ours last."""


def find_policies(names: str) -> list[str]:
    """The names of a list with commas; `all` means every one. Raises UserError."""
    if names == "all":
        return list(POLICIES)
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in POLICIES:
            close = difflib.get_close_matches(name, POLICIES, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"policy {name!r} is none of {', '.join(POLICIES)}{hint}")
    return list(dict.fromkeys(chosen))


def outcomes(situation: Situation, names: Iterable[str]) -> list[Outcome]:
    """What each policy makes of the situation; one without a plan says why."""
    found: list[Outcome] = []
    for name in names:
        try:
            found.append(POLICIES[name](situation))
        except NoFeasiblePlan as error:
            found.append(Outcome.stops(name, str(error)))
    return found
