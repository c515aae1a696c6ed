"""Which live ranks form the groups of the replicas that are kept (section 6.1 of the paper).

Eq. 3 and 4 choose the degree and the members of a group, spare ranks take the places of lost and
slow ones (`spares`), and each takes the seat in which it can keep most of what it holds (`seats`).
What no group needs is standby.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from resihp.compiler.locality import Neighbours, neighbours
from resihp.compiler.seats import seats
from resihp.compiler.sources import State
from resihp.compiler.spares import Demand, Rate, Wanting, nominal_rate, share_out
from resihp.ir.model import Group, GroupName

__all__ = ["form"]


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

    With `node_of` a group takes spare ranks of its own nodes only (`locality`).
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
