"""Layouts worth a plan: each choice of TP members, with the old layers and with new ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from resihp.compiler.adaptation.choices import choices_of
from resihp.compiler.adaptation.layouts import Layout, formed, kept_layout, num_holders
from resihp.compiler.adaptation.pp import SHARES, held_layers, repartitioned
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.adaptation.tp import Members
from resihp.errors import NoFeasiblePlan
from resihp.ir.model import LayerRange

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

    Only those in which each layer has `Situation.min_holders` holders, or else as many as it can.

    Raises NoFeasiblePlan where no choice of members gives every layer a place.
    """
    found: list[Candidate] = []
    kept = kept_layout(situation)
    if kept is not None:
        found.append(Candidate(kept, None, None))
    before = {group.name: frozenset(group.ranks) for group in situation.previous.groups}
    held = held_layers(situation)
    for choice in choices_of(situation, held):
        members = choice.members
        same = {place: frozenset(ranks) for place, ranks in members.items()} == before
        for share, layers in _layers(situation, members, held):
            if share is None and ((same and kept is not None) or not choice.fits_as_it_is):
                continue
            layout = formed(situation, members, layers)
            name = None if same else choice.name
            found.append(Candidate(layout, name, share, choice.gives_up))
    if not found:
        raise NoFeasiblePlan(
            "no split of the layers fits into the memory of the groups that are left"
        )
    holders = [min(situation.min_holders, num_holders(each.layout.groups)) for each in found]
    return [each for each, count in zip(found, holders, strict=True) if count == max(holders)]


def _layers(
    situation: Situation, members: Members, held: Mapping[int, tuple[LayerRange, ...]]
) -> Iterator[tuple[str | None, Mapping[int, tuple[LayerRange, ...]]]]:
    """Different partitions: that of before (`held`), then the repartitions."""
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
