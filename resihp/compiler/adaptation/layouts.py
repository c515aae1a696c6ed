"""Who forms the groups and holds which layers, before anybody is given work."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from resihp.compiler.adaptation.situation import Situation
from resihp.ir.model import Group, Load, Move, Plan, Reshard, Resume

__all__ = ["Layout", "kept_layout", "on_layout"]


class Layout(NamedTuple):
    """All of a plan but its streams."""

    groups: tuple[Group, ...]
    standby: tuple[int, ...]
    """Live ranks without a group."""
    lost: tuple[int, ...]
    reconfigure: tuple[Reshard | Move | Load, ...] = ()
    """How the groups get their state from those of the plan before."""


def kept_layout(situation: Situation) -> Layout | None:
    """That of the plan before; None where a member of a group is lost."""
    previous = situation.previous
    if not situation.lost.isdisjoint(previous.active_ranks):
        return None
    standby = tuple(sorted(situation.alive.difference(previous.active_ranks)))
    return Layout(previous.groups, standby, tuple(sorted(situation.lost)))


def on_layout(situation: Situation, layout: Layout) -> Plan:
    """The plan before with another layout; its streams are still the old ones."""
    step = situation.resume_step
    return msgspec.structs.replace(
        situation.previous,
        groups=layout.groups,
        resume=None if step is None else Resume(step=step),
        standby=layout.standby,
        lost=layout.lost,
        reconfigure=layout.reconfigure,
    )
