"""What is left of the state of the plan before, layer by layer, and who can give it.

Live ranks give what they hold (`State.alive`). What none of them holds any more comes out of a
snapshot of a lost rank that a live one can read, or else out of a checkpoint (`Stored`).

A layer's state is cut into as many chunks as the mesh has TP degree. Layers that lay in one stage
are held alike, so a plan has one `Part` for each of its stages. Nothing here looks at groups that
nobody asks about: on a large job almost all of them stay as they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import msgspec

from resihp.errors import NoFeasiblePlan
from resihp.ir.model import Group, GroupName, LayerRange, Plan
from resihp.ir.reshard import chunks_of_member, holder_of_chunk

__all__ = ["NOT_STORED", "Part", "Piece", "State", "Stored", "require_state", "spell_layers"]


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Where the state to continue from lies outside of live processes."""

    snapshots: Mapping[int, tuple[int, ...]] = {}
    """Of lost or returned ranks: the live ranks that can read a snapshot of that version."""
    has_checkpoint: bool = False
    """Whether that version is saved, complete."""
    is_only_saved: bool = False
    """Live ranks hold another version, so that everything is read from the saved one."""


NOT_STORED = Stored()
"""All that there is lives in processes."""


class Part(NamedTuple):
    """Consecutive layers that the same groups of the plan before held."""

    layers: LayerRange
    groups: tuple[Group, ...]

    def within(self, layers: LayerRange) -> Part:
        """What the part and `layers` have in common; they overlap."""
        first = max(self.layers.first, layers.first)
        return Part(LayerRange(first, min(self.layers.last, layers.last)), self.groups)


class Piece(NamedTuple):
    """A chunk of some layers that `rank` needs and does not hold."""

    rank: int
    chunk: int


class State:
    """The state that is left of `previous` without the ranks `lost`, by rank and by group."""

    def __init__(self, previous: Plan, lost: Collection[int], stored: Stored = NOT_STORED) -> None:
        self.previous = previous
        self.lost = frozenset(lost)
        self.stored = stored
        self.num_chunks = previous.mesh.tp
        self._groups = {group.name: group for group in previous.groups}
        self._parts = _parts(previous.groups)
        self._firsts = [part.layers.first for part in self._parts]
        self._all_chunks = frozenset(range(self.num_chunks))

    def group(self, name: GroupName) -> Group | None:
        """The group of the plan before at a place."""
        return self._groups.get(name)

    def own(self, part: Part, replica: int) -> Group | None:
        """The group of `replica` that held `part`."""
        for pp in {group.pp for group in (part.groups[0], part.groups[-1])}:
            group = self._groups.get(GroupName(replica, pp))
            if group is not None and _holds(group, part.layers.first):
                return group
        return None

    def parts(self, layers: Iterable[LayerRange]) -> Iterator[Part]:
        """The given layers in ascending order, cut where other groups held them.

        Layers that no group held, which a verified plan does not have, are left out.
        """
        for wanted in sorted(layers):
            at = max(bisect_right(self._firsts, wanted.first) - 1, 0)
            for part in self._parts[at:]:
                if part.layers.first > wanted.last:
                    break
                if part.layers.last >= wanted.first:
                    yield part.within(wanted)

    def shard(self, index: int, tp: int) -> range:
        """Chunks that member `index` of `tp` is to hold."""
        return chunks_of_member(index, tp, self.num_chunks)

    def held(self, rank: int, layer: int) -> range:
        """Chunks of `layer` that `rank` held."""
        place = self._place(rank)
        if place is None:
            return range(0)
        group, index = place
        return self.shard(index, group.tp) if _holds(group, layer) else range(0)

    def alive(self, group: Group) -> frozenset[int]:
        """Chunks that the live members of a group of the plan before hold."""
        if self.lost.isdisjoint(group.ranks):
            return self._all_chunks
        return frozenset(
            chunk
            for chunk in self._all_chunks
            if holder_of_chunk(group, chunk, self.num_chunks) not in self.lost
        )

    def readable(self, part: Part) -> Iterator[tuple[int, range]]:
        """Ranks that are gone and of whose shard of `part` a live rank can read a snapshot.

        With the chunks of it that they held.
        """
        for rank in sorted(self.stored.snapshots):
            chunks = self.held(rank, part.layers.first)
            if chunks and self.readers(rank):
                yield rank, chunks

    def readers(self, rank: int) -> tuple[int, ...]:
        """The live ranks that can read the snapshot of `rank`."""
        return tuple(r for r in self.stored.snapshots.get(rank, ()) if r not in self.lost)

    def missing(self, part: Part, target: Group) -> list[Piece]:
        """What members of `target`, which is to hold `part`, lack of it."""
        layer, tp = part.layers.first, target.tp
        before = self._groups.get(target.name)
        if before is not None and before.ranks == target.ranks:
            if _holds(before, layer):
                return []
            shards = [(rank, self.shard(index, tp)) for index, rank in enumerate(target.ranks)]
            return [Piece(rank, chunk) for rank, shard in shards for chunk in shard]
        return [
            Piece(rank, chunk)
            for index, rank in enumerate(target.ranks)
            for held in (self.held(rank, layer),)
            for chunk in self.shard(index, tp)
            if chunk not in held
        ]

    def lost_parts(self) -> Iterator[tuple[Part, tuple[int, ...]]]:
        """Parts of which chunks have no source any more, with these chunks."""
        if self.stored.has_checkpoint:
            return
        for part in self._parts:
            left = set(self._all_chunks)
            for _, chunks in self.readable(part):
                left.difference_update(chunks)
            for group in part.groups:
                left -= self.alive(group)
                if not left:
                    break
            if left:
                yield part, tuple(sorted(left))

    def _place(self, rank: int) -> tuple[Group, int] | None:
        """Group of the plan before, and index in it; most ranks are where the mesh puts them."""
        mesh = self.previous.mesh
        home = self._groups.get(GroupName(rank // (mesh.tp * mesh.pp), rank // mesh.tp % mesh.pp))
        if home is not None and rank in home.ranks:
            return home, home.ranks.index(rank)
        return self._places.get(rank)

    @cached_property
    def _places(self) -> dict[int, tuple[Group, int]]:
        return {
            rank: (group, index)
            for group in self.previous.groups
            for index, rank in enumerate(group.ranks)
        }


def require_state(state: State) -> None:
    """Raises NoFeasiblePlan when a chunk of some layer's state has no source."""
    gone = list(state.lost_parts())
    if not gone:
        return
    (first, chunks), *_ = gone
    alike = [part for part, same in gone if same == chunks and part.groups == first.groups]
    shown = ", ".join(map(str, chunks))
    layers = ",".join(str(part.layers) for part in alike)
    raise NoFeasiblePlan(
        f"no live rank still holds chunk {shown} of {state.num_chunks} of layers {layers}"
    )


def spell_layers(group: Group) -> str:
    """The layers of a group as a plan writes them: `0..3` or `0..3,8..11`."""
    return ",".join(map(str, group.layers))


def _holds(group: Group, layer: int) -> bool:
    return any(first <= layer <= last for first, last in group.layers)


def _parts(groups: Iterable[Group]) -> list[Part]:
    """The layers of all groups, cut where one of them begins or ends, each with its holders."""
    alike: dict[tuple[LayerRange, ...], list[Group]] = {}
    for group in groups:
        alike.setdefault(group.layers, []).append(group)
    cuts = sorted({cut for held in alike for first, last in held for cut in (first, last + 1)})
    holders: dict[int, tuple[Group, ...]] = {}
    for held, members in alike.items():
        for first, last in held:
            for cut in cuts[bisect_right(cuts, first) - 1 : bisect_right(cuts, last)]:
                holders[cut] = (*holders.get(cut, ()), *members)
    return [
        Part(LayerRange(first, end - 1), holders[first])
        for first, end in pairwise(cuts)
        if first in holders
    ]
