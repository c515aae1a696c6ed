"""What live ranks hold of the plan before, and which of its groups can give the rest away.

A layer's state is cut into as many chunks as the mesh has TP degree. What a member of a new group
holds already stays where it is; everything else comes from one group of the plan before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from resihp.ir.model import Group, GroupName, Plan
from resihp.ir.reshard import chunks_of_member, holder_of_chunk

__all__ = ["Source", "State", "spell_layers"]


class Source(NamedTuple):
    """Groups of the plan before, with the chunks that their live members hold."""

    groups: tuple[GroupName, ...]
    chunks: frozenset[int]


class State:
    """Chunks by rank and by group. All layers of a position are held alike, so none is named."""

    def __init__(self, previous: Plan, lost: Collection[int]) -> None:
        self._num_chunks = previous.mesh.tp
        self._held: dict[int, tuple[int, range]] = {}
        self._sources: dict[int, list[Source]] = {}
        for group in sorted(previous.groups, key=lambda group: group.name):
            for index, rank in enumerate(group.ranks):
                self._held[rank] = group.pp, self.shard(index, group.tp)
            alive = frozenset(
                chunk
                for chunk in range(self._num_chunks)
                if holder_of_chunk(group, chunk, self._num_chunks) not in lost
            )
            self._sources.setdefault(group.pp, []).append(Source((group.name,), alive))

    def shard(self, index: int, tp: int) -> range:
        """Chunks that member `index` of `tp` is to hold."""
        return chunks_of_member(index, tp, self._num_chunks)

    def held(self, rank: int, stage: int) -> range:
        """Chunks of the layers of `stage` that `rank` held."""
        held_stage, chunks = self._held.get(rank, (stage, range(0)))
        return chunks if held_stage == stage else range(0)

    def missing(self, stage: int, ranks: Sequence[int]) -> list[int]:
        """The chunk of each move that makes `ranks` a group at `stage`, member by member."""
        return [
            chunk
            for index, rank in enumerate(ranks)
            for chunk in self.shard(index, len(ranks))
            if chunk not in self.held(rank, stage)
        ]

    def sources(self, stage: int, own: int) -> list[Source]:
        """Groups that held `stage`: that of replica `own` first, then by replica."""
        return sorted(self._sources[stage], key=lambda source: source.groups[0].replica != own)

    def everything(self, stage: int) -> Source:
        """All groups that held `stage`, as one source."""
        sources = self._sources[stage]
        return Source(
            tuple(group for source in sources for group in source.groups),
            frozenset[int]().union(*(source.chunks for source in sources)),
        )

    def suppliers(self, stage: int, own: int, ranks: Sequence[int]) -> list[GroupName]:
        """Who gives `ranks` what they lack: one group where one can, else as few as it takes.

        Each chunk comes from the first group of the list whose holder of it is alive.
        """
        missing = frozenset(self.missing(stage, ranks))
        suppliers: list[GroupName] = []
        sources = self.sources(stage, own)
        while missing:
            best = max(sources, key=lambda source: len(source.chunks & missing))
            assert best.chunks & missing, "a chunk without a live holder"
            suppliers.append(best.groups[0])
            missing -= best.chunks
        return suppliers

    def lost_chunks(self, stage: int) -> list[int]:
        """Chunks of the layers of `stage` that no live rank holds any more."""
        left = frozenset[int]().union(*(source.chunks for source in self._sources[stage]))
        return [chunk for chunk in range(self._num_chunks) if chunk not in left]


def spell_layers(group: Group) -> str:
    """The layers of a group as a plan writes them: `0..3` or `0..3,8..11`."""
    return ",".join(map(str, group.layers))
