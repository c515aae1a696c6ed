"""Which ranks sit where in a TP group, so that as little state as possible has to move."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resihp.compiler.assignment import assign
from resihp.compiler.facts import num_parameters, whole_parameters
from resihp.compiler.sources import Part, State
from resihp.ir.model import GroupName, LayerRange, Mesh

__all__ = ["seats"]

_LEVELS = 16
"""Preferences between ranks that hold as much; more than `_level` has."""


def seats(
    state: State,
    place: GroupName,
    layers: Sequence[LayerRange],
    candidates: Sequence[int],
    degree: int,
    *,
    speed_of: Callable[[int], float] = lambda _: 1.0,
    node_of: Callable[[int], int] | None = None,
) -> tuple[int, ...]:
    """The `degree` members of a group that holds `layers` at `place`, in the order of the shards.

    The group is as fast as `candidates` allow, and of all such groups it is one that needs the
    fewest bytes. Where that leaves a choice, members of the group before stay, then ranks of the
    same node and of the nearest places in the healthy layout come, then the lowest numbers.
    """
    assert degree <= len(candidates)
    slowest = sorted(map(speed_of, candidates), reverse=True)[degree - 1]
    before = state.group(place)
    own = frozenset(() if before is None else before.ranks)
    nodes = frozenset(() if node_of is None else map(node_of, own - state.lost))

    def level(rank: int) -> int:
        if rank in own:
            return 0
        is_far = bool(nodes) and node_of is not None and node_of(rank) not in nodes
        return 1 + 4 * is_far + _distance(rank, place, state.previous.mesh)

    parts = list(state.parts(layers))
    fast = sorted(
        (rank for rank in candidates if speed_of(rank) >= slowest),
        key=lambda rank: (level(rank), rank),
    )
    kept = {rank: _kept(state, parts, rank, degree) for rank in fast}
    holders = [rank for rank in fast if any(kept[rank])]
    others = [rank for rank in fast if not any(kept[rank])][:degree]
    choice = sorted((*holders, *others), key=lambda rank: (level(rank), rank))
    scale = _LEVELS * degree
    costs = [[level(rank) - scale * kept[rank][seat] for rank in choice] for seat in range(degree)]
    ranks = tuple(choice[column] for column in assign(costs))
    # Ascending members read better, where that moves no more.
    ascending = tuple(sorted(ranks))
    total = sum(kept[rank][seat] for seat, rank in enumerate(ranks))
    return ascending if sum(kept[r][s] for s, r in enumerate(ascending)) >= total else ranks


def _kept(state: State, parts: Sequence[Part], rank: int, degree: int) -> list[int]:
    """Parameters that `rank` need not be given, for each seat of a group of `degree`."""
    model, kept = state.previous.model, [0] * degree
    for part in parts:
        held = state.held(rank, part.layers.first)
        if not held:
            continue
        whole = whole_parameters(model, part.layers)
        cut = num_parameters(model, part.layers, 1) - whole
        for seat in range(degree):
            shard = state.shard(seat, degree)
            common = min(held.stop, shard.stop) - max(held.start, shard.start)
            kept[seat] += whole + cut * max(common, 0) // state.num_chunks
    return kept


def _distance(rank: int, place: GroupName, mesh: Mesh) -> int:
    """How far a rank's place in the healthy layout is: same group, replica, stage, elsewhere."""
    home = GroupName(rank // (mesh.tp * mesh.pp), rank // mesh.tp % mesh.pp)
    if home == place:
        return 0
    if home.replica == place.replica:
        return 1
    return 2 if home.pp == place.pp else 3
