"""The reconfigure block: where the new groups get from what they lack.

What a member of a new group holds already stays where it is. Everything else comes from as few
groups of the plan before as can give it, from the same node first, then from the same replica,
then from whichever group gives least so far. What no live rank holds comes out of snapshots of lost
ranks, and what none of those has out of the saved version. What the lines mean is fixed by
`resihp.ir.reshard`: each piece comes from the first line that can give it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from resihp.compiler.sources import Part, Piece, State
from resihp.ir.model import Group, GroupName, LayerRange, Load, Plan, Reshard, Restore, Source
from resihp.ir.reshard import holder_of_chunk

__all__ = ["lines_to", "read_all", "reconfiguration"]

_Name = TypeVar("_Name", GroupName, int)
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
    lines = lines_to(State(previous, lost), groups, node_of=node_of)
    return tuple(line for line in lines if isinstance(line, Reshard))  # nothing else is stored


def lines_to(
    state: State,
    groups: Iterable[Group],
    *,
    step: int | None = None,
    node_of: NodeOf | None = None,
) -> tuple[Source, ...]:
    """The same for a state that is known, of version `step` where it may be read from storage."""
    if state.stored.is_only_saved:
        assert step is not None, "a saved version has a step"
        return read_all(groups, step)
    changed = [group for group in groups if group is not state.group(group.name)]
    choice = _Choice(state, step, node_of)
    return tuple(
        line
        for group in sorted(changed, key=lambda group: group.name)
        if group != state.group(group.name)
        for line in choice.lines(group)
    )


def read_all(groups: Iterable[Group], step: int) -> tuple[Source, ...]:
    """Lines that bring all state of `groups` from the saved version `step`."""
    return tuple(line for group in groups for line in _loads(group.name, group.layers, step))


class _Choice:
    """Chooses sources for one target after the other, so that all give about as much."""

    def __init__(self, state: State, step: int | None, node_of: NodeOf | None) -> None:
        self._state = state
        self._step = step
        self._node_of = node_of
        self._given: Counter[GroupName] = Counter()
        """Chunks of layers that each group gives so far."""
        self._read: Counter[int] = Counter()
        """Chunks of layers that each rank reads out of snapshots so far."""
        self._by_node: dict[int, dict[int, list[Group]]] = {}
        """Node -> groups on it, for each list of holders that was asked about, by its id."""

    def lines(self, target: Group) -> list[Source]:
        """One line for each source and each longest run of layers that it brings."""
        runs: dict[GroupName, list[LayerRange]] = {}
        snapshots: dict[tuple[int, int], list[LayerRange]] = {}
        saved: list[LayerRange] = []
        for part in self._state.parts(target.layers):
            pieces = self._state.missing(part, target)
            living = self._living(part, pieces)
            for name in self._suppliers(part, target, living, runs):
                _extend(runs.setdefault(name, []), part.layers)
            gone = frozenset(piece.chunk for piece in pieces) - {piece.chunk for piece in living}
            for source in self._snapshots(part, target, gone):
                _extend(snapshots.setdefault(source, []), part.layers)
            if gone.difference(*(chunks for _, chunks in self._state.readable(part))):
                _extend(saved, part.layers)
        return [
            *self._reshards(target, runs),
            *self._restores(target, snapshots),
            *self._saved(target, saved),
        ]

    def _reshards(
        self, target: Group, runs: Mapping[GroupName, Sequence[LayerRange]]
    ) -> list[Reshard]:
        lines = [
            Reshard(layers=layers, source=name, target=target.name)
            for name, found in runs.items()
            for layers in found
        ]
        return sorted(lines, key=lambda line: line.layers)

    def _restores(
        self, target: Group, runs: Mapping[tuple[int, int], Sequence[LayerRange]]
    ) -> list[Restore]:
        lines = [
            Restore(layers=layers, source=source, giver=giver, target=target.name)
            for (source, giver), found in runs.items()
            for layers in found
        ]
        return sorted(lines, key=lambda line: (line.layers, line.source))

    def _saved(self, target: Group, runs: Sequence[LayerRange]) -> list[Source]:
        if not runs:
            return []
        assert self._step is not None, "a chunk without a source"
        return _loads(target.name, runs, self._step)

    def _living(self, part: Part, pieces: Sequence[Piece]) -> list[Piece]:
        """Those of `pieces` that a live rank holds."""
        if not pieces:
            return []
        alive = frozenset[int]()
        for group in part.groups:
            alive |= self._state.alive(group)
            if len(alive) == self._state.num_chunks:
                return list(pieces)
        return [piece for piece in pieces if piece.chunk in alive]

    def _snapshots(
        self, part: Part, target: Group, gone: frozenset[int]
    ) -> Iterator[tuple[int, int]]:
        """Lost ranks out of whose snapshots `target` gets the chunks `gone`, and who reads them.

        A member of the target reads for itself where it can, else whoever has read least so far.
        """
        if not gone:
            return
        found = {rank: frozenset(chunks) for rank, chunks in self._state.readable(part)}
        wanted = gone & frozenset[int]().union(*found.values())
        for rank in _cover(wanted, found, lambda rank: rank):
            readers = self._state.readers(rank)
            reader = min(readers, key=lambda r: (r not in target.ranks, self._read[r], r))
            self._read[reader] += len(wanted & found[rank]) * (
                part.layers.last - part.layers.first + 1
            )
            yield rank, reader

    def _suppliers(
        self, part: Part, target: Group, pieces: Sequence[Piece], used: Collection[GroupName]
    ) -> list[GroupName]:
        """Groups that give `target` the `pieces` that it lacks of `part`, the nearest first."""
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


def _extend(runs: list[LayerRange], layers: LayerRange) -> None:
    """Add `layers`, to the last of `runs` where they go on from it."""
    if runs and runs[-1].last + 1 == layers.first:
        runs[-1] = LayerRange(runs[-1].first, layers.last)
    else:
        runs.append(layers)


def _loads(target: GroupName, layers: Iterable[LayerRange], step: int) -> list[Source]:
    runs: list[LayerRange] = []
    for each in sorted(layers):
        _extend(runs, each)
    return [Load(layers=run, step=step, target=target) for run in runs]


def _cover(
    wanted: frozenset[int],
    alive: Mapping[_Name, frozenset[int]],
    preference: Callable[[_Name], Any],
) -> list[_Name]:
    """Few groups, or ranks, that have all of `wanted` between them, the preferred ones first.

    Each time the one that has most of what is still missing; none that the others make needless.
    """
    missing, chosen = wanted, list[_Name]()
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
