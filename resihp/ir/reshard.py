"""Which pieces of state cross ranks when one plan follows another.

A layer's state is cut along its shards into N = max TP degree of both meshes equal chunks:
member i of a group of degree t holds chunks i*N//t .. (i+1)*N//t - 1. Both ends of a move derive
the same list from the two plans, so nothing is negotiated.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from resihp.ir.model import Group, Plan, Reshard

__all__ = ["ShardMove", "chunks_of_member", "holder_of_chunk", "num_state_chunks", "transfers"]


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

    The order is that of the reconfigure block, then layer, target member, chunk. Both plans are
    verified. Replicated tensors come from the first member of the source that is not lost.
    """
    return tuple(move for reshard in plan.reconfigure for move in _moves(previous, plan, reshard))


def _moves(previous: Plan, plan: Plan, reshard: Reshard) -> Iterator[ShardMove]:
    source, target = previous.group(*reshard.source), plan.group(*reshard.target)
    assert source is not None, f"{reshard.source} is no group of the previous plan"
    assert target is not None, f"{reshard.target} is no group of this plan"
    lost = frozenset(plan.lost)
    first_alive = next(rank for rank in source.ranks if rank not in lost)
    num_chunks = num_state_chunks(previous, plan)
    held = {rank: _held(previous, rank, num_chunks) for rank in target.ranks}
    for layer in range(reshard.layers.first, reshard.layers.last + 1):
        for index, rank in enumerate(target.ranks):
            layers, chunks = held[rank]
            holds_layer = layers.start <= layer < layers.stop
            if not holds_layer:
                yield ShardMove(
                    layer=layer,
                    chunk=0,
                    num_chunks=1,
                    source=first_alive,
                    target=rank,
                    replicated=True,
                )
            for chunk in chunks_of_member(index, target.tp, num_chunks):
                if not (holds_layer and chunk in chunks):
                    holder = holder_of_chunk(source, chunk, num_chunks)
                    assert holder not in lost, f"rank {holder} is lost and cannot send"
                    yield ShardMove(
                        layer=layer,
                        chunk=chunk,
                        num_chunks=num_chunks,
                        source=holder,
                        target=rank,
                    )


def _held(previous: Plan, rank: int, num_chunks: int) -> tuple[range, range]:
    """Layers and chunks of each that `rank` holds before the reconfiguration."""
    group = previous.group_of(rank)
    if group is None:
        return range(0), range(0)
    layers = range(group.layers.first, group.layers.last + 1)
    return layers, chunks_of_member(group.ranks.index(rank), group.tp, num_chunks)
