"""Which ranks exchange what in one generation: every group that a rank's work needs.

All of it follows from the plan, so every rank derives the same groups. They are listed in an
order in which all ranks can build them: whatever two ranks share comes in the same order on both.

| role     | members                                            | used by                     |
|----------|----------------------------------------------------|-----------------------------|
| world    | all active ranks                                   | the vote                    |
| tp       | the TP group                                       | layers, on compute          |
| gather   | the TP group                                       | gathers, and copies of units|
| reduce.C | of each replica who holds chunk C at this position | REDUCE_GRADS                |
| tied.P.C | who holds chunk C of either tensor of tied pair P  | STEP                        |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from resihp.ir.reshard import chunks_of_member, holder_of_chunk

if TYPE_CHECKING:
    from resihp.executor.model import Model
    from resihp.ir.model import Group, Plan

__all__ = [
    "Membership",
    "TiedCluster",
    "groups_at",
    "memberships",
    "num_chunks_at",
    "tied_clusters",
]


class Membership(NamedTuple):
    """One group that a rank is in."""

    role: str
    """What the rank's work calls it (table above)."""
    name: str
    """Unique in the generation, the same on all members."""
    ranks: tuple[int, ...]


class TiedCluster(NamedTuple):
    """Ranks that give each other the gradients of one chunk of a tied pair of tensors."""

    chunk: int
    num_chunks: int
    inputs: tuple[int, ...]
    """Ranks that hold the chunk of the input side, by replica; the first one gives."""
    outputs: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of them, ascending."""
        return tuple(sorted({*self.inputs, *self.outputs}))


def groups_at(plan: Plan, pp: int) -> list[Group]:
    """Groups at position `pp` of the pipeline, by replica."""
    return sorted((g for g in plan.groups if g.pp == pp), key=lambda group: group.replica)


def num_chunks_at(plan: Plan, *positions: int) -> int:
    """Largest TP degree at any of the positions: the chunks that their tensors are summed in."""
    return max(group.tp for group in plan.groups if group.pp in positions)


def memberships(model: Model, plan: Plan, rank: int) -> list[Membership]:
    """The groups of `rank`, which is active in `plan`."""
    group = plan.group_of(rank)
    assert group is not None, f"rank {rank} is in no group"
    found = [
        Membership("world", "world", plan.active_ranks),
        Membership("tp", f"tp.{group.name}", group.ranks),
        Membership("gather", f"gather.{group.name}", group.ranks),
    ]
    num_chunks = num_chunks_at(plan, group.pp)
    peers = groups_at(plan, group.pp)
    for chunk in chunks_of_member(group.ranks.index(rank), group.tp, num_chunks):
        ranks = tuple(holder_of_chunk(peer, chunk, num_chunks) for peer in peers)
        found.append(Membership(f"reduce.{chunk}", f"reduce.pp{group.pp}.{chunk}", ranks))
    for pair in range(len(model.tied)):
        for cluster in tied_clusters(model, plan, pair):
            if rank in cluster.ranks:
                role = f"tied.{pair}.{cluster.chunk}"
                found.append(Membership(role, f"{role}.{cluster.ranks[0]}", cluster.ranks))
    return found


def tied_clusters(model: Model, plan: Plan, pair: int) -> list[TiedCluster]:
    """Who exchanges gradients of the tied tensors `pair`: chunk by chunk, cluster by cluster.

    Reduced gradients are equal in all replicas, so each replica settles it between its own two
    groups. One that lacks either position joins a replica that has both; where none has both,
    all are one cluster. A rank is in one cluster per chunk that it holds.
    """
    into, out = (_position_of(plan, model.layer_of(name)) for name in model.tied[pair])
    num_chunks = num_chunks_at(plan, into, out)
    inputs = {group.replica: group for group in groups_at(plan, into)}
    outputs = {group.replica: group for group in groups_at(plan, out)}
    return [
        TiedCluster(
            chunk,
            num_chunks,
            tuple(holder_of_chunk(inputs[r], chunk, num_chunks) for r in replicas if r in inputs),
            tuple(holder_of_chunk(outputs[r], chunk, num_chunks) for r in replicas if r in outputs),
        )
        for chunk in range(num_chunks)
        for replicas in _clusters_of(sorted(inputs), sorted(outputs))
    ]


def _position_of(plan: Plan, layer: int) -> int:
    return next(
        group.pp
        for group in plan.groups
        if any(first <= layer <= last for first, last in group.layers)
    )


def _clusters_of(inputs: Sequence[int], outputs: Sequence[int]) -> list[list[int]]:
    """Replicas cluster by cluster; the first of each has both sides, where one does."""
    both = [replica for replica in inputs if replica in outputs]
    alone = [replica for replica in sorted({*inputs, *outputs}) if replica not in both]
    if not both:
        return [alone]
    return [[replica, *alone[at :: len(both)]] for at, replica in enumerate(both)]
