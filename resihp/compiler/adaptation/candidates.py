"""Layouts worth a plan: each choice of TP members, with the old layers and with new ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from resihp.compiler.adaptation.layouts import Layout, formed, kept_layout
from resihp.compiler.adaptation.pp import SHARES, held_layers, repartitioned
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.adaptation.tp import RULES, Members, choose_members, degraded
from resihp.errors import NoFeasiblePlan
from resihp.ir.model import GroupName, LayerRange

__all__ = ["Candidate", "candidates"]


class Candidate(NamedTuple):
    """A layout and what is different in it."""

    layout: Layout
    tp: str | None
    """The rule that chose the members; None where all groups have those of before."""
    pp: str | None
    """How layers were shared out; None where they stay."""
    gives_up: bool = False
    """Whether groups that could go on are given up."""

    @property
    def changes(self) -> list[str]:
        """What is changed, and how."""
        parts = (("TP", self.tp), ("PP", self.pp))
        return [f"{level} ({how})" for level, how in parts if how is not None]

    def num_changed(self, situation: Situation) -> int:
        """Groups with other ranks or layers than before, or that are gone."""
        before = {group.name: group for group in situation.previous.groups}
        after = {group.name: group for group in self.layout.groups}
        return sum(before.get(name) is not group for name, group in after.items()) + len(
            before.keys() - after.keys()
        )


def candidates(situation: Situation) -> list[Candidate]:
    """All different ones; the layout of before, where it can go on, first.

    Raises NoFeasiblePlan where no choice of members gives every layer a place.
    """
    found: list[Candidate] = []
    kept = kept_layout(situation)
    if kept is not None:
        found.append(Candidate(kept, None, None))
    before = {group.name: frozenset(group.ranks) for group in situation.previous.groups}
    for rule, members, gives_up in _members(situation):
        same = {place: frozenset(ranks) for place, ranks in members.items()} == before
        for share, layers in _layers(situation, members):
            if same and share is None and kept is not None:
                continue
            layout = formed(situation, members, layers)
            found.append(Candidate(layout, None if same else rule, share, gives_up))
    return found


def _members(situation: Situation) -> Iterator[tuple[str, Members, bool]]:
    """Different choices of members by the first rule that makes them, that of before first."""
    layers = held_layers(situation)
    seen: list[Members] = []
    refusal: NoFeasiblePlan | None = None
    choices = [(name, rule, frozenset[GroupName]()) for name, rule in RULES.items()]
    first, fastest = next(iter(RULES.items()))
    choices += [(f"{first}, {what}", fastest, gone) for what, gone in _given_up(situation)]
    for name, rule, without in choices:
        try:
            members = choose_members(situation, rule, layers, without)
        except NoFeasiblePlan as error:
            refusal = error
            continue
        if members not in seen:
            seen.append(members)
            yield name, members, bool(without)
    if not seen:
        assert refusal is not None
        raise refusal


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


def _layers(
    situation: Situation, members: Members
) -> Iterator[tuple[str | None, Mapping[int, tuple[LayerRange, ...]]]]:
    """Different partitions: that of before, then the repartitions."""
    held = held_layers(situation)
    yield None, held
    if not (situation.profile.repartitions and situation.has_one_stage_each):
        return
    seen = [held]
    for name, share in SHARES.items():
        ranges = repartitioned(situation, members, share)
        layers = {} if ranges is None else {pp: (one,) for pp, one in enumerate(ranges)}
        if layers and layers not in seen:
            seen.append(layers)
            yield name, layers
