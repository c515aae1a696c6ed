"""Which live ranks form the groups of the replicas that are kept (section 6.1 of the paper).

Eq. 3 and 4 choose the degree and the members of a group, spare ranks take the places of lost and
slow ones (`spares`), and each takes the seat in which it can keep most of what it holds (`seats`).
What no group needs is standby.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from resihp.compiler.locality import Neighbours, neighbours
from resihp.compiler.reconfigure import lines_to
from resihp.compiler.seats import seats
from resihp.compiler.sources import State, spell_layers
from resihp.compiler.spares import Demand, Rate, Wanting, nominal_rate, share_out
from resihp.ir.model import Group, GroupName, Mesh, Reshard

__all__ = ["Regrouped", "Shortage", "form", "regroup"]


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
    *,
    speeds: Mapping[int, float] | None = None,
    rate: Rate = nominal_rate,
    node_of: Callable[[int], int] | None = None,
    grow: bool = False,
) -> Regrouped | list[Shortage]:
    """Form all `groups` from the ranks `alive`, or say which of them cannot be formed.

    Ranks of `groups` that are not alive are gaps, so a group that is to come back may name none
    that is, and groups of the plan before that are not among `groups` are dropped. `min_degrees`
    are powers of two, the TP degrees below which a device's memory does not suffice (k_min of
    Eq. 3; 1 where none is given). `speeds` are throughputs of slow ranks relative to a healthy
    one. With `node_of` a group takes spare ranks of its own nodes only (`locality`). A group that
    has lost nobody, has no slow member and fits stays as it is, unless it is to `grow`: then every
    group below the mesh's TP degree may take spare ranks.
    """
    speeds = speeds or {}
    pool = alive.difference(chain.from_iterable(group.ranks for group in groups))
    wanting = [
        Wanting(group, tuple(rank for rank in group.ranks if rank in alive), least)
        for group in groups
        for least in (min_degrees.get(group.name, 1),)
        if group.tp < least
        or (grow and group.tp < mesh.tp)
        or not alive.issuperset(group.ranks)
        or not speeds.keys().isdisjoint(group.ranks)
    ]

    def speed_of(rank: int) -> float:
        return speeds.get(rank, 1.0)

    formed, short = _formed(wanting, pool, state, speed_of, rate, node_of)
    if short:
        return [_too_few(want) for want in short]
    new = tuple(formed.get(group.name, group) for group in groups)
    free = pool.union(*(want.own for want in wanting))
    return Regrouped(
        groups=new,
        reshards=lines_to(state, new, node_of=node_of),
        standby=tuple(sorted(free.difference(*(group.ranks for group in formed.values())))),
    )


def form(
    wanting: Sequence[Wanting],
    pool: frozenset[int],
    state: State,
    *,
    speed_of: Callable[[int], float],
    rate: Rate = nominal_rate,
    node_of: Callable[[int], int] | None = None,
) -> dict[GroupName, Group]:
    """Those of `wanting` that can be formed of their own ranks and of `pool`.

    Where ranks are too few for all, the neediest are given up, the last of them first, and what
    they have left is spare for the others.
    """
    left = list(wanting)
    while True:
        formed, short = _formed(left, pool, state, speed_of, rate, node_of)
        if not short:
            return formed
        _, at = max((want.least - len(want.own), left.index(want)) for want in short)
        pool = pool.union(left.pop(at).own)


def _formed(
    wanting: Sequence[Wanting],
    pool: frozenset[int],
    state: State,
    speed_of: Callable[[int], float],
    rate: Rate,
    node_of: Callable[[int], int] | None,
) -> tuple[dict[GroupName, Group], list[Wanting]]:
    """All groups, or else those that have too few ranks where ranks are too few for all."""
    mesh, short = state.previous.mesh, list[GroupName]()
    shares: list[tuple[Neighbours, dict[GroupName, Demand]]] = []
    for near in neighbours(wanting, pool, mesh, node_of):
        demands = share_out(near.wanting, near.pool, mesh.tp, speed_of, rate)
        if demands is None:
            short += [want.group.name for want in near.wanting if len(want.own) < want.least]
        else:
            shares.append((near, demands))
    if short:
        return {}, [want for want in wanting if want.group.name in short]
    return {
        name: group
        for near, demands in shares
        for name, group in _seated(*near, demands, state, speed_of, node_of).items()
    }, []


def _seated(
    wanting: Sequence[Wanting],
    spare: frozenset[int],
    demands: Mapping[GroupName, Demand],
    state: State,
    speed_of: Callable[[int], float],
    node_of: Callable[[int], int] | None,
) -> dict[GroupName, Group]:
    """The groups with what each demands, of the ranks that do those that move least.

    Who asks for the fastest ranks comes first, and of these who leaves some over: then any fast
    enough ranks will do. A group takes what another wants to keep only where nothing else is left.
    """

    def turn(want: Wanting) -> tuple[float, bool, GroupName]:
        demand = demands[want.group.name]
        return -demand.speed, demand.num_spares > 0, want.group.name

    formed: dict[GroupName, Group] = {}
    owned = {want.group.name: set(want.own) for want in wanting}
    for want in sorted(wanting, key=turn):
        group, (degree, speed, _) = want.group, demands[want.group.name]
        spare = spare.union(owned.pop(group.name))
        fast = [rank for rank in sorted(spare) if speed_of(rank) >= speed]
        for name, ranks in sorted(owned.items(), key=lambda item: demands[item[0]].speed):
            given = [rank for rank in sorted(ranks, key=speed_of) if speed_of(rank) >= speed]
            given = given[: max(0, degree - len(fast))]
            fast += given
            owned[name] = ranks.difference(given)
            spare = spare.union(given)
        members = seats(state, group.name, group.layers, fast, degree, node_of=node_of)
        formed[group.name] = msgspec.structs.replace(group, ranks=members)
        spare = spare.difference(members)
    return formed


def _too_few(want: Wanting) -> Shortage:
    num_alive, group = len(want.own), want.group
    has = f"{num_alive} live rank{'' if num_alive == 1 else 's'}"
    needs = "1" if want.least == 1 else f"{want.least} for its memory"
    return Shortage(
        group.name,
        f"{group.name} (layers {spell_layers(group)}) has {has} of its own, needs {needs}, and too "
        "few are standby",
    )
