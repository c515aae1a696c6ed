"""Choices of the members of all groups that are worth a layout: by each rule, and with less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.adaptation.tp import RULES, Members, choose_members, degraded
from resihp.compiler.locality import home_ranks
from resihp.compiler.spares import Rate
from resihp.errors import NoFeasiblePlan
from resihp.ir.model import Group, GroupName, LayerRange, Op

__all__ = ["Choice", "choices_of"]

_MOST_MIXED = 3
"""Degraded groups for which every mixture of rules is tried."""
_SMALL_WORLD = 128
"""Ranks of a job that is small enough for that."""


class Choice(NamedTuple):
    """Members of all groups."""

    name: str
    """How they were chosen."""
    members: Members
    gives_up: bool = False
    """Whether groups that could go on are given up."""
    fits_as_it_is: bool = True
    """Whether the groups have room for the layers that they hold now."""


class _Asked(NamedTuple):
    """What a choice is made by."""

    name: str
    rule: Rate
    without: frozenset[GroupName] = frozenset()
    fewest_layers: bool = False


def choices_of(situation: Situation, layers: Mapping[int, tuple[LayerRange, ...]]) -> list[Choice]:
    """All different ones, the paper's first; position pp holds `layers[pp]` now.

    Raises NoFeasiblePlan where none gives every layer a place.
    """
    found: list[Choice] = []
    refusal: NoFeasiblePlan | None = None
    for asked in _asked(situation):
        held = _fewest(situation) if asked.fewest_layers else layers
        try:
            members = choose_members(situation, asked.rule, held, asked.without)
        except NoFeasiblePlan as error:
            refusal = refusal or error
            continue
        if all(members != choice.members for choice in found):
            fits = not asked.fewest_layers
            found.append(Choice(asked.name, members, bool(asked.without), fits))
    healthy = _healthy(situation)
    if not situation.lost and all(healthy != choice.members for choice in found):
        found.append(Choice("as at first", healthy))
    if not found:
        assert refusal is not None
        raise refusal
    return found


def _healthy(situation: Situation) -> Members:
    """Where all ranks are there: those that each group had when the job began."""
    mesh = situation.previous.mesh
    return {
        GroupName(replica, pp): tuple(home_ranks(GroupName(replica, pp), mesh))
        for replica in range(mesh.dp)
        for pp in range(mesh.pp)
    }


def _asked(situation: Situation) -> Iterator[_Asked]:
    first, fastest = next(iter(RULES.items()))
    rules = {**RULES, "least time": _least_time(situation)}
    for name, rule in rules.items():
        yield _Asked(name, rule)
    for what, gone in _given_up(situation):
        yield _Asked(f"{first}, {what}", fastest, gone)
    yield from _mixed(situation)
    if situation.profile.repartitions and situation.has_one_stage_each:
        yield _Asked(f"{first}, with fewer layers", fastest, fewest_layers=True)


def _least_time(situation: Situation) -> Rate:
    """By what a group's layers take, the exchange inside the group counted."""
    pricing = situation.pricing

    def rate(group: Group, degree: int, speed: float) -> float:
        if degree not in pricing.costs.layer:
            return 0.0
        costs = (
            pricing.stage(layers, degree, recomputes=again)
            for layers, again in zip(group.layers, situation.recomputes(group.pp), strict=True)
        )
        seconds = (
            c.of(op).seconds(situation.lengths, speed) for c in costs for op in (Op.F, Op.BW)
        )
        return 1.0 / sum(seconds)

    return rate


def _given_up(situation: Situation) -> Iterator[tuple[str, frozenset[GroupName]]]:
    """Places that may be worth less than the memory, the reduction and the bubbles they cost."""
    groups = situation.previous.groups
    hit = frozenset(g.name for g in groups if not situation.lost.isdisjoint(g.ranks))
    if hit:
        yield "without groups that lost ranks", hit
        replicas = {place.replica for place in hit}
        whole = frozenset(group.name for group in groups if group.replica in replicas)
        yield "without replicas that lost ranks", whole
    slow = frozenset(degraded(situation))
    if slow - hit:
        yield "without degraded groups", slow


def _mixed(situation: Situation) -> Iterator[_Asked]:
    """One rule for each of a few degraded groups of a small job."""
    places = degraded(situation)
    is_small = situation.previous.mesh.world <= _SMALL_WORLD
    if not (is_small and 2 <= len(places) <= _MOST_MIXED):
        return
    for names in product(RULES, repeat=len(places)):
        if len(set(names)) > 1:
            of_place = {place: RULES[name] for place, name in zip(places, names, strict=True)}
            told = "; ".join(f"{place} {name}" for place, name in zip(places, names, strict=True))
            yield _Asked(told, _by_place(of_place))


def _by_place(rules: Mapping[GroupName, Rate]) -> Rate:
    fastest = next(iter(RULES.values()))

    def rate(group: Group, degree: int, speed: float) -> float:
        return rules.get(group.name, fastest)(group, degree, speed)

    return rate


def _fewest(situation: Situation) -> dict[int, tuple[LayerRange, ...]]:
    """One layer for each position, of the kind that it has: with a table, or without."""
    last = situation.previous.model.layers - 1
    num_stages = situation.placement.num_stages
    ends = {0: 0, num_stages - 1: last}
    places = {pp: ends.get(pp, min(1, last)) for pp in range(num_stages)}
    return {pp: (LayerRange(layer, layer),) for pp, layer in places.items()}
