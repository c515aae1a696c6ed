"""Which ranks a group may take at all: those of the nodes that it is on.

The members of a TP group exchange every activation, so a spare of another node would slow the
group down more than it helps. Only a group that its own nodes cannot form goes, whole, to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from resihp.compiler.spares import Wanting
from resihp.ir.model import GroupName, Mesh

__all__ = ["Neighbours", "home_ranks", "neighbours"]


class Neighbours(NamedTuple):
    """Groups that want the same spare ranks."""

    wanting: list[Wanting]
    pool: frozenset[int]
    """Spare ranks of their nodes."""


def home_ranks(place: GroupName, mesh: Mesh) -> range:
    """The ranks of a group in the healthy layout."""
    first = (place.replica * mesh.pp + place.pp) * mesh.tp
    return range(first, first + mesh.tp)


def neighbours(
    wanting: Sequence[Wanting],
    pool: frozenset[int],
    mesh: Mesh,
    node_of: Callable[[int], int] | None,
) -> list[Neighbours]:
    """All of `wanting`, those apart that have no node in common; without nodes all together.

    What a group that goes to another node leaves behind is spare on its old one.
    """
    if node_of is None:
        return [Neighbours(list(wanting), pool)]
    placed: list[tuple[Wanting, frozenset[int]]] = []
    for want in wanting:
        nodes = frozenset(map(node_of, want.own or home_ranks(want.group.name, mesh)))
        placed.append((want, nodes))
    left = Counter(map(node_of, pool))
    for at, (want, nodes) in enumerate(placed):
        lacking = max(0, want.least - len(want.own))
        if lacking <= sum(left[node] for node in nodes):
            _promise(left, nodes, lacking)
            continue
        node = max(left, key=lambda node: (left[node], -node), default=None)
        if node is not None and left[node] >= want.least:
            left.update(map(node_of, want.own))
            left[node] -= want.least
            placed[at] = want._replace(own=()), frozenset((node,))
            pool = pool.union(want.own)
    return _joined(placed, pool, node_of)


def _promise(left: Counter[int], nodes: Collection[int], count: int) -> None:
    """Take `count` spare ranks of `nodes` from those that are left for other groups."""
    for node in sorted(nodes):
        taken = min(count, left[node])
        left[node] -= taken
        count -= taken


def _joined(
    placed: Sequence[tuple[Wanting, frozenset[int]]],
    pool: Collection[int],
    node_of: Callable[[int], int],
) -> list[Neighbours]:
    """Groups that share nodes, directly or through others, with the spare ranks of these."""
    parts: list[tuple[list[Wanting], frozenset[int]]] = []
    for want, nodes in placed:
        met = [part for part in parts if part[1] & nodes]
        parts = [part for part in parts if not part[1] & nodes]
        members = [member for some, _ in met for member in some]
        parts.append(([*members, want], nodes.union(*(on for _, on in met))))
    on_node: dict[int, list[int]] = {}
    for rank in pool:
        on_node.setdefault(node_of(rank), []).append(rank)
    return [
        Neighbours(some, frozenset(rank for node in nodes for rank in on_node.get(node, ())))
        for some, nodes in parts
    ]
