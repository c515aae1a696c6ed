"""A plan as lint and diff look at it: its lanes, with the places of their instructions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from resihp.ir.diagnostics import Span
from resihp.ir.lanes import Lane, alike, lanes_of
from resihp.ir.model import GroupName, Plan
from resihp.ir.placement import Placement, placement_of
from resihp.ir.source import Parsed

__all__ = ["View", "view_of"]


class View(NamedTuple):
    """The lanes of a plan."""

    parsed: Parsed
    placement: Placement
    alike: Mapping[int, tuple[int, ...]]
    """Replicas that each replica with lanes stands for."""
    lanes: Mapping[GroupName, Lane]

    @property
    def plan(self) -> Plan:
        """What is looked at."""
        return self.parsed.plan

    def span(self, lane: Lane, index: int) -> Span:
        """Place of an instruction."""
        return self.parsed.streams[lane.stream].span(index)

    def line(self, lane: Lane, index: int) -> int:
        """Line of an instruction."""
        return self.span(lane, index).line


def view_of(parsed: Parsed, *, every_replica: bool = False) -> View:
    """The lanes of a plan: one for all replicas that do the same, or those of `every_replica`."""
    plan = parsed.plan
    groups = alike(plan)
    if every_replica:
        groups = {replica: (replica,) for members in groups.values() for replica in members}
    return View(parsed, placement_of(plan), groups, lanes_of(plan, groups))
