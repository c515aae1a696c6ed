"""Between which groups tensors are cut."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from resihp.ir.model import Group, GroupName, Plan
from resihp.ir.placement import placement_of

__all__ = ["Scatter", "cuts_of", "everywhere", "is_cut"]

Scatter = Callable[[Group, Group], bool]
"""Whether tensors from a group to another one of equal degree are cut."""


def everywhere(sender: Group, receiver: Group) -> bool:
    """The choice to cut wherever it can be done."""
    return sender.tp == receiver.tp


def is_cut(plan: Plan, sender: Group, receiver: Group, scatter: Scatter | None) -> bool:
    """Unequal degrees have no choice; nor have single ranks, or tokens that do not divide."""
    if sender.tp != receiver.tp:
        return True
    can_be = sender.tp > 1 and plan.batch.tokens % sender.tp == 0
    return can_be and scatter is not None and scatter(sender, receiver)


def cuts_of(plan: Plan, scatter: Scatter) -> Callable[[int], tuple[bool, ...]]:
    """Of a replica: what `scatter` says of its own edges, in both directions."""
    groups = {group.name: group for group in plan.groups}
    at = placement_of(plan).pp
    hops = [hop for hop in dict.fromkeys(pairwise(at)) if hop[0] != hop[1]]

    def cuts(replica: int) -> tuple[bool, ...]:
        found: list[bool] = []
        for one, other in hops:
            here, there = groups.get(GroupName(replica, one)), groups.get(GroupName(replica, other))
            if here is not None and there is not None:
                found.append(is_cut(plan, here, there, scatter))
                found.append(is_cut(plan, there, here, scatter))
        return tuple(found)

    return cuts
