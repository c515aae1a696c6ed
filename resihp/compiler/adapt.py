"""Adaptation for those who hold a plan and nothing else: prices come from the plan's own model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resihp.compiler.adaptation import ANYTHING, Decision, Profile, Situation
from resihp.compiler.adaptation import adapt as adapt_situation
from resihp.compiler.cluster import Cluster, Health
from resihp.compiler.defaults import pricing_of_plan
from resihp.ir.model import Plan

__all__ = ["adapt"]


def adapt(
    plan: Plan,
    *,
    lost: Iterable[int] = (),
    speed: Mapping[int, float] | None = None,
    step: int | None = None,
    cluster: Cluster | None = None,
    profile: Profile = ANYTHING,
    min_holders: int = 2,
) -> Decision:
    """The best plan after `plan` without the ranks `lost`, and why it is that one.

    `speed` has the throughput of slow ranks relative to a healthy one, in (0, 1]. With `step` the
    new plan redoes that iteration, which was interrupted. `cluster` is by default the smallest
    preset that can hold the job. `plan` is verified; ranks that it lost stay lost. `min_holders`
    groups are to hold each layer, where that can be.

    Raises UserError for ranks that the job does not have, or for a job that no preset can hold,
    and NoFeasiblePlan where state is gone with its last holder or nothing fits into memory.
    """
    health = Health(lost=frozenset(lost), speed=speed or {})
    pricing = pricing_of_plan(plan, health, cluster)
    return adapt_situation(Situation(plan, pricing, profile, step, min_holders=min_holders))
