"""Who forms the groups and holds which layers, before anybody is given work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.reconfigure import lines_to
from resihp.compiler.seats import seats
from resihp.ir.model import Group, GroupName, LayerRange, Plan, Resume, Source

__all__ = [
    "Layout",
    "formed",
    "gains_holders",
    "kept_layout",
    "left_of",
    "num_holders",
    "on_layout",
    "supplied",
]


class Layout(NamedTuple):
    """All of a plan but its streams."""

    groups: tuple[Group, ...]
    standby: tuple[int, ...]
    """Live ranks without a group."""
    lost: tuple[int, ...]
    reconfigure: tuple[Source, ...] = ()
    """How the groups get their state from those of the plan before."""


def kept_layout(situation: Situation) -> Layout | None:
    """That of the plan before; None where a member of a group is lost."""
    previous = situation.previous
    if not situation.lost.isdisjoint(previous.active_ranks):
        return None
    standby = tuple(sorted(situation.alive.difference(previous.active_ranks)))
    # Groups that stay as they are lack their state, too, where that is only saved.
    return supplied(situation, Layout(previous.groups, standby, tuple(sorted(situation.lost))))


def left_of(situation: Situation) -> Layout | None:
    """The groups that lost nobody, all other live ranks standby; None where a stage has none."""
    groups = tuple(g for g in situation.previous.groups if situation.lost.isdisjoint(g.ranks))
    if {group.pp for group in groups} != {group.pp for group in situation.previous.groups}:
        return None
    used = [rank for group in groups for rank in group.ranks]
    standby = tuple(sorted(situation.alive.difference(used)))
    return supplied(situation, Layout(groups, standby, tuple(sorted(situation.lost))))


def formed(
    situation: Situation,
    members: Mapping[GroupName, tuple[int, ...]],
    layers: Mapping[int, tuple[LayerRange, ...]],
) -> Layout:
    """Groups of `members`, seated so that little moves. Position pp holds `layers[pp]`.

    How they get their state is left open (`supplied`).
    """
    groups = tuple(
        _group(situation, place, members[place], layers[place.pp]) for place in sorted(members)
    )
    used = [rank for group in groups for rank in group.ranks]
    return Layout(
        groups=groups,
        standby=tuple(sorted(situation.alive.difference(used))),
        lost=tuple(sorted(situation.lost)),
    )


def gains_holders(situation: Situation, before: Plan, after: Plan) -> bool:
    """Whether layers that had fewer holders than they should get more of them."""
    wanted = min(situation.min_holders, num_holders(after.groups))
    return num_holders(before.groups) < wanted


def num_holders(groups: Iterable[Group]) -> int:
    """How many groups hold each layer, at least: all but one may be lost."""
    return min(Counter(group.pp for group in groups).values())


def supplied(situation: Situation, layout: Layout) -> Layout:
    """`layout` with the lines that bring its groups their state.

    The state that is left has a source of everything (`sources.require_state`).
    """
    node_of = situation.pricing.cluster.node_of
    lines = lines_to(situation.state, layout.groups, step=situation.resume_step, node_of=node_of)
    return layout._replace(reconfigure=lines)


def _group(
    situation: Situation,
    place: GroupName,
    ranks: tuple[int, ...],
    layers: tuple[LayerRange, ...],
) -> Group:
    before = situation.state.group(place)
    if before is not None and set(before.ranks) == set(ranks):
        if before.layers == layers:
            return before
        # The shards that the members keep of each layer are the same in the same seats.
        return msgspec.structs.replace(before, layers=layers)
    node_of = situation.pricing.cluster.node_of
    seated = seats(situation.state, place, layers, ranks, len(ranks), node_of=node_of)
    return Group(replica=place.replica, pp=place.pp, ranks=seated, layers=layers)


def on_layout(situation: Situation, layout: Layout) -> Plan:
    """The plan before with another layout; its streams are still the old ones."""
    step = situation.resume_step
    return msgspec.structs.replace(
        situation.previous,
        groups=layout.groups,
        resume=None if step is None else Resume(step=step),
        standby=layout.standby,
        lost=layout.lost,
        # Where everything is read from the saved version nobody was lost in the plan before.
        returned=() if situation.stored.is_only_saved else tuple(sorted(situation.returned)),
        reconfigure=layout.reconfigure,
    )
