"""Which live ranks form the groups of the replicas that are kept (section 6.1 of the paper).

With all survivors equally fast, Eq. 3 and 4 choose the largest power of two of them. Standby ranks
take the places of lost ones first, and what a power of two leaves over becomes standby.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from resihp.compiler.reconfigure import lines_to
from resihp.compiler.seats import seats
from resihp.compiler.sources import State, spell_layers
from resihp.ir.model import Group, GroupName, Mesh, Reshard

__all__ = ["Regrouped", "Shortage", "regroup"]


class Shortage(NamedTuple):
    """Why a group cannot be formed."""

    group: GroupName
    reason: str


class Regrouped(NamedTuple):
    """The groups, how they get their state, and the ranks that are left over."""

    groups: tuple[Group, ...]
    reshards: tuple[Reshard, ...]
    standby: tuple[int, ...]


def regroup(
    groups: Sequence[Group],
    alive: frozenset[int],
    state: State,
    mesh: Mesh,
    min_degrees: Mapping[GroupName, int],
) -> Regrouped | list[Shortage]:
    """Form all `groups` again from the ranks `alive`, or say which of them cannot be formed.

    `min_degrees` are powers of two, the TP degrees below which a device's memory does not suffice
    (k_min of Eq. 3). A group that lost nobody and fits stays as it is.
    """
    survivors = {g.name: [rank for rank in g.ranks if rank in alive] for g in groups}
    touched = [g for g in groups if len(survivors[g.name]) < max(g.tp, min_degrees[g.name])]
    pool = set(alive.difference(*(g.ranks for g in groups)))
    degrees = _degrees(touched, survivors, len(pool), mesh.tp, min_degrees)
    if degrees is None:
        return [
            _too_few(group, len(survivors[group.name]), min_degrees[group.name])
            for group in touched
            if len(survivors[group.name]) < min_degrees[group.name]
        ]
    formed: dict[GroupName, Group] = {}
    # Groups that shrink come first: those that grow may take the members they leave over.
    for group in sorted(touched, key=lambda g: degrees[g.name] > len(survivors[g.name])):
        own, tp = survivors[group.name], degrees[group.name]
        ranks = seats(state, group.name, group.layers, [*own, *pool], tp)
        pool.update(own)
        pool.difference_update(ranks)
        formed[group.name] = msgspec.structs.replace(group, ranks=ranks)
    return Regrouped(
        groups=tuple(formed.get(group.name, group) for group in groups),
        reshards=lines_to(state, formed.values()),
        standby=tuple(sorted(pool)),
    )


def _degrees(
    touched: Sequence[Group],
    survivors: Mapping[GroupName, Sequence[int]],
    num_spare: int,
    max_degree: int,
    min_degrees: Mapping[GroupName, int],
) -> dict[GroupName, int] | None:
    """TP degree of each touched group, the smallest raised first; None when ranks are too few."""
    degrees = {
        group.name: max(_power_of_two(len(survivors[group.name])), min_degrees[group.name])
        for group in touched
    }
    num_spare += sum(len(survivors[name]) - degree for name, degree in degrees.items())
    if num_spare < 0:
        return None
    while raisable := [
        name for name, degree in degrees.items() if degree <= min(num_spare, max_degree // 2)
    ]:
        smallest = min(raisable, key=lambda name: (degrees[name], name))
        num_spare -= degrees[smallest]
        degrees[smallest] *= 2
    return degrees


def _power_of_two(limit: int) -> int:
    """The largest power of two up to `limit`; 0 below 1."""
    return 1 << (limit.bit_length() - 1) if limit > 0 else 0


def _too_few(group: Group, num_alive: int, min_degree: int) -> Shortage:
    has = f"{num_alive} live rank{'' if num_alive == 1 else 's'}"
    needs = "1" if min_degree == 1 else f"{min_degree} for its memory"
    return Shortage(
        group.name,
        f"{group.name} (layers {spell_layers(group)}) has {has} of its own, needs {needs}, and too "
        "few are standby",
    )
