"""Which pieces of state cross ranks, or are read from storage, when one plan follows another.

A layer's state is cut along its shards into N = max TP degree of both meshes equal chunks:
member i of a group of degree t holds chunks i*N//t .. (i+1)*N//t - 1. What a rank held before
and still needs stays where it is; every other piece comes from the first line of the reconfigure
block that can give it. Parameters, both moments and the step go together. Both ends of a move
derive the same list from the two plans, so nothing is negotiated. What comes out of a snapshot is
sent by the rank that reads it, which may be the one that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from resihp.ir.model import Group, GroupName, LayerRange, Load, Move, Plan, Reshard, Restore, Source

__all__ = [
    "Change",
    "Giver",
    "Need",
    "ShardLoad",
    "ShardMove",
    "chunks_of_member",
    "holder_of_chunk",
    "holds",
    "layers_of",
    "loads",
    "nothing_before",
    "num_state_chunks",
    "transfers",
]


class ShardMove(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of one layer's state on its way from rank `source` to rank `target`.

    Only a piece out of a snapshot may have one rank at both ends.
    """

    layer: int
    chunk: int
    """Which of `num_chunks` equal pieces of every sharded tensor; 0 when `replicated`."""
    num_chunks: int
    source: int
    target: int
    replicated: bool = False
    """The tensors that every member holds whole (norms, biases): once per layer and target."""
    snapshot_of: int | None = None
    """The lost rank whose snapshot `source` reads it from; None: `source` holds it itself."""


class ShardLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of one layer's state that rank `target` reads from the saved version `step`."""

    layer: int
    chunk: int
    num_chunks: int
    step: int
    target: int
    replicated: bool = False


class Need(NamedTuple):
    """What one rank lacks of one layer."""

    rank: int
    member: int
    """Its index in the group."""
    chunks: list[int]
    whole: bool
    """It lacks the tensors that every member holds whole, too."""


class Giver(NamedTuple):
    """Who gives a piece: a line, by its index in the block, and its rank (None: a checkpoint)."""

    line: int
    rank: int | None


def num_state_chunks(previous: Plan, plan: Plan) -> int:
    """Pieces that a layer's sharded tensors are cut into while moving."""
    return max(previous.mesh.tp, plan.mesh.tp)


def chunks_of_member(index: int, tp: int, num_chunks: int) -> range:
    """Chunks that member `index` of a group of degree `tp` holds."""
    return range(index * num_chunks // tp, (index + 1) * num_chunks // tp)


def holder_of_chunk(group: Group, chunk: int, num_chunks: int) -> int:
    """The rank of `group` that holds `chunk`."""
    return group.ranks[chunk * group.tp // num_chunks]


def nothing_before(plan: Plan) -> Plan:
    """The plan before one whose ranks hold nothing yet, as where a job begins with a checkpoint."""
    return msgspec.structs.replace(
        plan, groups=(), streams=(), standby=(), lost=(), returned=(), reconfigure=(), resume=None
    )


def layers_of(group: Group) -> Iterator[int]:
    """Every layer that the group holds, in its order."""
    for first, last in group.layers:
        yield from range(first, last + 1)


def holds(group: Group, layers: LayerRange) -> bool:
    """Whether the group holds all of `layers`, in whatever stages."""
    missing = layers.first
    for first, last in sorted(group.layers):
        if first <= missing <= last:
            missing = last + 1
    return missing > layers.last


def transfers(previous: Plan, plan: Plan) -> tuple[ShardMove, ...]:
    """Every move of the reconfiguration from `previous` to `plan`, in one fixed order.

    The order is that of the targets in the reconfigure block, then layer, target member, chunk.
    Both plans are verified.
    """
    return tuple(piece for piece in _pieces(previous, plan) if isinstance(piece, ShardMove))


def loads(previous: Plan, plan: Plan) -> tuple[ShardLoad, ...]:
    """Every piece that is read from a saved version, in the same order. Both are verified."""
    return tuple(piece for piece in _pieces(previous, plan) if isinstance(piece, ShardLoad))


class Change:
    """Two layouts: what each rank lacks, and who can give it."""

    def __init__(self, previous: Plan, plan: Plan) -> None:
        self.plan = plan
        self.num_chunks = num_state_chunks(previous, plan)
        self.lost = frozenset(plan.lost)
        self.old = {group.name: group for group in previous.groups}
        self.member = {
            rank: (group, index)
            for group in previous.groups
            for index, rank in enumerate(group.ranks)
        }
        """Group of the plan before, and index in it, of each rank that was in one."""
        self._lines: dict[GroupName | int, list[int]] = {}
        """Indices of the lines to each group or rank."""
        for index, line in enumerate(plan.reconfigure):
            self._lines.setdefault(line.target, []).append(index)

    def lines_to(self, target: Group) -> list[int]:
        """Indices of the lines that bring something to members of `target`."""
        targets = (target.name, *target.ranks)
        return sorted(index for each in targets for index in self._lines.get(each, ()))

    def needs(self, target: Group, layer: int) -> Iterator[Need]:
        """What members of `target` lack of `layer`, member by member."""
        for index, rank in enumerate(target.ranks):
            held = self._held_chunks(rank, layer)
            wanted = chunks_of_member(index, target.tp, self.num_chunks)
            chunks = [chunk for chunk in wanted if held is None or chunk not in held]
            if chunks:
                yield Need(rank, index, chunks, held is None)

    def _held_chunks(self, rank: int, layer: int) -> range | None:
        """None where the rank held nothing of the layer."""
        if rank not in self.member:
            return None
        group, index = self.member[rank]
        if not any(first <= layer <= last for first, last in group.layers):
            return None
        return chunks_of_member(index, group.tp, self.num_chunks)

    def covers(self, line: Source, rank: int, layer: int) -> bool:
        """Whether a line to the group of `rank` is about what that rank lacks of `layer`."""
        concerned = not isinstance(line, Move) or line.target == rank
        return concerned and line.layers.first <= layer <= line.layers.last

    def holder(self, line: Reshard | Move | Restore, chunk: int) -> int | None:
        """The rank that is to give `chunk`, dead or alive, by a line whose source exists.

        None where that is in no shard of the rank whose snapshot is read.
        """
        match line:
            case Reshard():
                return holder_of_chunk(self.old[line.source], chunk, self.num_chunks)
            case Move():
                return line.source
            case Restore():
                group, index = self.member[line.source]
                shard = chunks_of_member(index, group.tp, self.num_chunks)
                return line.giver if chunk in shard else None

    def givers_of_whole(self, line: Reshard | Move | Restore) -> tuple[int, ...]:
        """Ranks, dead or alive, that are to give the tensors that every member holds whole."""
        match line:
            case Reshard():
                return self.old[line.source].ranks
            case Move():
                return (line.source,)
            case Restore():
                return (line.giver,)

    def giver(self, lines: Sequence[int], chunk: int) -> Giver | None:
        """Of `chunk`: the first of `lines` that can give it; None if all holders are lost."""
        for index in lines:
            line = self.plan.reconfigure[index]
            if isinstance(line, Load):
                return Giver(index, None)
            rank = self.holder(line, chunk)
            if rank is not None and rank not in self.lost:
                return Giver(index, rank)
        return None

    def giver_of_whole(self, lines: Sequence[int], member: int) -> Giver | None:
        """Of the tensors that every member holds whole, to a member of the target.

        The first source that has a live rank gives them, each of its live ranks to some members.
        """
        for index in lines:
            line = self.plan.reconfigure[index]
            if isinstance(line, Load):
                return Giver(index, None)
            alive = [rank for rank in self.givers_of_whole(line) if rank not in self.lost]
            if alive:
                return Giver(index, alive[member % len(alive)])
        return None


def _pieces(previous: Plan, plan: Plan) -> Iterator[ShardMove | ShardLoad]:
    if not plan.reconfigure:
        return
    change = Change(previous, plan)
    groups = {group.name: group for group in plan.groups}
    of_rank = {rank: group.name for group in plan.groups for rank in group.ranks}
    targets = dict.fromkeys(
        of_rank[line.target] if isinstance(line, Move) else line.target for line in plan.reconfigure
    )
    for name in targets:
        lines = change.lines_to(groups[name])
        brought = {layer for index in lines for layer in _layers_in(plan.reconfigure[index])}
        for layer in layers_of(groups[name]):
            if layer not in brought:
                continue  # all of it is where it is needed
            for need in change.needs(groups[name], layer):
                yield from _brought(change, lines, layer, need)


def _layers_in(line: Source) -> range:
    return range(line.layers.first, line.layers.last + 1)


def _brought(
    change: Change, lines: Sequence[int], layer: int, need: Need
) -> Iterator[ShardMove | ShardLoad]:
    rank, num_chunks = need.rank, change.num_chunks
    about = [i for i in lines if change.covers(change.plan.reconfigure[i], rank, layer)]
    if need.whole:
        giver = change.giver_of_whole(about, need.member)
        yield _piece(change, giver, layer, 0, 1, rank, replicated=True)
    for chunk in need.chunks:
        giver = change.giver(about, chunk)
        yield _piece(change, giver, layer, chunk, num_chunks, rank, replicated=False)


def _piece(
    change: Change,
    giver: Giver | None,
    layer: int,
    chunk: int,
    num_chunks: int,
    target: int,
    *,
    replicated: bool,
) -> ShardMove | ShardLoad:
    assert giver is not None, f"nobody left can give chunk {chunk} of layer {layer} to {target}"
    line = change.plan.reconfigure[giver.line]
    if giver.rank is not None:
        return ShardMove(
            layer=layer,
            chunk=chunk,
            num_chunks=num_chunks,
            source=giver.rank,
            target=target,
            replicated=replicated,
            snapshot_of=line.source if isinstance(line, Restore) else None,
        )
    assert isinstance(line, Load)
    return ShardLoad(
        layer=layer,
        chunk=chunk,
        num_chunks=num_chunks,
        step=line.step,
        target=target,
        replicated=replicated,
    )
