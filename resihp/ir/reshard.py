"""Which pieces of state cross ranks when one plan follows another.

A layer's state is cut along its shards into N = max TP degree of both meshes equal chunks:
member i of a group of degree t holds chunks i*N//t .. (i+1)*N//t - 1. Both ends of a move derive
the same list from the two plans, so nothing is negotiated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from resihp.ir.model import Group, GroupName, Plan

__all__ = [
    "ShardMove",
    "chunks_of_member",
    "holder_of_chunk",
    "live_holder",
    "num_state_chunks",
    "transfers",
]


class ShardMove(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of one layer's state on its way from rank `source` to rank `target`."""

    layer: int
    chunk: int
    """Which of `num_chunks` equal pieces of every sharded tensor; 0 when `replicated`."""
    num_chunks: int
    source: int
    target: int
    replicated: bool = False
    """The tensors that every member holds whole (norms, biases): once per layer and target."""


def num_state_chunks(previous: Plan, plan: Plan) -> int:
    """Pieces that a layer's sharded tensors are cut into while moving."""
    return max(previous.mesh.tp, plan.mesh.tp)


def chunks_of_member(index: int, tp: int, num_chunks: int) -> range:
    """Chunks that member `index` of a group of degree `tp` holds."""
    return range(index * num_chunks // tp, (index + 1) * num_chunks // tp)


def holder_of_chunk(group: Group, chunk: int, num_chunks: int) -> int:
    """The rank of `group` that holds `chunk`."""
    return group.ranks[chunk * group.tp // num_chunks]


def transfers(previous: Plan, plan: Plan) -> tuple[ShardMove, ...]:
    """Every move of the reconfiguration from `previous` to `plan`, in one fixed order.

    The order is that of the targets in the reconfigure block, then layer, target member, chunk.
    Where several lines bring a layer to a target, a chunk comes from the first one whose holder
    of it is alive. Both plans are verified.
    """
    targets = dict.fromkeys(reshard.target for reshard in plan.reshards)
    return tuple(move for name in targets for move in _moves(previous, plan, name))


def _moves(previous: Plan, plan: Plan, name: GroupName) -> Iterator[ShardMove]:
    target = plan.group(*name)
    assert target is not None, f"{name} is no group of this plan"
    num_chunks = num_state_chunks(previous, plan)
    held = {rank: _held(previous, rank, num_chunks) for rank in target.ranks}
    for layer in range(target.sole_layers.first, target.sole_layers.last + 1):
        sources = _sources(previous, plan, name, layer)
        if not sources:
            continue  # verified: every member holds what it needs of this layer
        for index, rank in enumerate(target.ranks):
            layers, chunks = held[rank]
            holds_layer = layers.start <= layer < layers.stop
            if not holds_layer:
                yield ShardMove(
                    layer=layer,
                    chunk=0,
                    num_chunks=1,
                    source=next(r for s in sources for r in s.ranks if r not in plan.lost),
                    target=rank,
                    replicated=True,
                )
            for chunk in chunks_of_member(index, target.tp, num_chunks):
                if not (holds_layer and chunk in chunks):
                    holder = live_holder(sources, chunk, num_chunks, plan.lost)
                    assert holder is not None, f"nobody left can give chunk {chunk} of {layer}"
                    yield ShardMove(
                        layer=layer,
                        chunk=chunk,
                        num_chunks=num_chunks,
                        source=holder[1],
                        target=rank,
                    )


def live_holder(
    sources: Sequence[Group], chunk: int, num_chunks: int, lost: Collection[int]
) -> tuple[int, int] | None:
    """(index of the source, rank) of the first of `sources` whose holder of `chunk` is alive."""
    for index, source in enumerate(sources):
        rank = holder_of_chunk(source, chunk, num_chunks)
        if rank not in lost:
            return index, rank
    return None


def _sources(previous: Plan, plan: Plan, target: GroupName, layer: int) -> list[Group]:
    """Groups of the plan before that bring `layer` to `target`, in the order of their lines."""
    found: list[Group] = []
    for reshard in plan.reshards:
        if reshard.target == target and reshard.layers.first <= layer <= reshard.layers.last:
            source = previous.group(*reshard.source)
            assert source is not None, f"{reshard.source} is no group of the previous plan"
            found.append(source)
    return found


def _held(previous: Plan, rank: int, num_chunks: int) -> tuple[range, range]:
    """Layers and chunks of each that `rank` holds before the reconfiguration."""
    group = previous.group_of(rank)
    if group is None:
        return range(0), range(0)
    layers = range(group.sole_layers.first, group.sole_layers.last + 1)
    return layers, chunks_of_member(group.ranks.index(rank), group.tp, num_chunks)
