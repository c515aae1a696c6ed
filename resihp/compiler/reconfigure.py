"""The reconfigure block: which groups of the plan before give the new groups what they lack.

What a member of a new group holds already stays where it is. Everything else comes from as few
groups as can give it, from the same node first, then from the same replica, then from whichever
group gives least so far. What the lines mean is fixed by `resihp.ir.reshard`: each piece comes from
the first line that can give it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from resihp.compiler.sources import Part, Piece, State
from resihp.ir.model import Group, GroupName, LayerRange, Plan, Reshard
from resihp.ir.reshard import holder_of_chunk

__all__ = ["lines_to", "reconfiguration"]

NodeOf = Callable[[int], int]
"""The node that a rank is on."""


def reconfiguration(
    previous: Plan,
    groups: Iterable[Group],
    lost: Collection[int],
    *,
    node_of: NodeOf | None = None,
) -> tuple[Reshard, ...]:
    """The reconfigure block of a plan with `groups` after `previous`, without the ranks `lost`.

    `groups` may have any layers, ranks and degrees. `lost` names all ranks that are lost, those of
    `previous` too; each chunk of the state has a live holder (`sources.require_state`).
    """
    return lines_to(State(previous, lost), groups, node_of=node_of)


def lines_to(
    state: State, groups: Iterable[Group], *, node_of: NodeOf | None = None
) -> tuple[Reshard, ...]:
    """The same for a state that is known."""
    changed = [group for group in groups if group is not state.group(group.name)]
    choice = _Choice(state, node_of)
    return tuple(
        line
        for group in sorted(changed, key=lambda group: group.name)
        if group != state.group(group.name)
        for line in choice.lines(group)
    )


class _Choice:
    """Chooses sources for one target after the other, so that all give about as much."""

    def __init__(self, state: State, node_of: NodeOf | None) -> None:
        self._state = state
        self._node_of = node_of
        self._given: Counter[GroupName] = Counter()
        """Chunks of layers that each group gives so far."""
        self._by_node: dict[int, dict[int, list[Group]]] = {}
        """Node -> groups on it, for each list of holders that was asked about, by its id."""

    def lines(self, target: Group) -> list[Reshard]:
        """One line for each source and each longest run of layers that it brings."""
        runs: dict[GroupName, list[LayerRange]] = {}
        for part in self._state.parts(target.layers):
            for name in self._suppliers(part, target, runs):
                found = runs.setdefault(name, [])
                if found and found[-1].last + 1 == part.layers.first:
                    found[-1] = LayerRange(found[-1].first, part.layers.last)
                else:
                    found.append(part.layers)
        lines = [
            Reshard(layers=layers, source=name, target=target.name)
            for name, found in runs.items()
            for layers in found
        ]
        return sorted(lines, key=lambda line: line.layers)

    def _suppliers(self, part: Part, target: Group, used: Collection[GroupName]) -> list[GroupName]:
        """Groups that give `target` what it lacks of `part`, the nearest first."""
        pieces = self._state.missing(part, target)
        if not pieces:
            return []
        alive = {group.name: self._state.alive(group) for group in self._near(part, target)}
        wanted = frozenset(piece.chunk for piece in pieces)
        if not any(chunks >= wanted for chunks in alive.values()):
            alive = {group.name: self._state.alive(group) for group in part.groups}

        @cache
        def preference(name: GroupName) -> tuple[int, bool, bool, int, GroupName]:
            group = self._state.group(name)
            assert group is not None
            far = self._num_crossings(group, pieces)
            return far, name.replica != target.replica, name not in used, self._given[name], name

        chosen = _cover(wanted, alive, preference)
        amount = len(pieces) * (part.layers.last - part.layers.first + 1)
        self._given.update(dict.fromkeys(chosen, -(-amount // len(chosen))))
        return chosen

    def _near(self, part: Part, target: Group) -> list[Group]:
        """Holders of `part` in the replica of `target`, or else on one of its nodes."""
        own = self._state.own(part, target.replica)
        found = [] if own is None else [own]
        if self._node_of is not None:
            on_node = self._nodes(part.groups, self._node_of)
            for node in {self._node_of(rank) for rank in target.ranks}:
                found += on_node.get(node, ())
        return found

    def _nodes(self, groups: tuple[Group, ...], node_of: NodeOf) -> dict[int, list[Group]]:
        if id(groups) not in self._by_node:
            nodes: dict[int, list[Group]] = {}
            for group in groups:
                for node in {node_of(rank) for rank in group.ranks}:
                    nodes.setdefault(node, []).append(group)
            self._by_node[id(groups)] = nodes
        return self._by_node[id(groups)]

    def _num_crossings(self, source: Group, pieces: Sequence[Piece]) -> int:
        """How many of the pieces that `source` has would come from another node."""
        if self._node_of is None:
            return 0
        holders = [
            (holder_of_chunk(source, chunk, self._state.num_chunks), rank) for rank, chunk in pieces
        ]
        return sum(
            self._node_of(holder) != self._node_of(rank)
            for holder, rank in holders
            if holder not in self._state.lost
        )


def _cover(
    wanted: frozenset[int],
    alive: Mapping[GroupName, frozenset[int]],
    preference: Callable[[GroupName], Any],
) -> list[GroupName]:
    """Few groups that have all of `wanted` between them, the preferred ones first.

    Each time the one that has most of what is still missing; none that the others make needless.
    """
    missing, chosen = wanted, list[GroupName]()
    while missing:
        most = max(len(chunks & missing) for chunks in alive.values())
        assert most, "a chunk without a live holder"
        best = min(
            (name for name, chunks in alive.items() if len(chunks & missing) == most),
            key=preference,
        )
        chosen.append(best)
        missing -= alive[best]
    for name in list(chosen):
        others = [alive[other] for other in chosen if other != name]
        if wanted <= frozenset[int]().union(*others):
            chosen.remove(name)
    return sorted(chosen, key=preference)
