"""Gradients of tied tensors: the sum of both sides, given to both, as the first thing of STEP.

A tied pair is one logical tensor that the first and the last stage each hold. Both take the same
update, so they stay equal to the bit. The exchange is per chunk, inside one cluster of ranks
(`memberships.tied_clusters`); its members already hold reduced gradients, equal in all replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from resihp.executor.device.interface import Communicator
from resihp.executor.layouts import slice_of
from resihp.executor.memberships import TiedCluster, tied_clusters
from resihp.executor.model import Model
from resihp.ir.model import Plan
from resihp.ir.program import Program

__all__ = ["TiedSums"]


class TiedSums:
    """One rank's part in the exchange of all tied pairs; nothing to do where it holds neither."""

    def __init__(
        self, model: Model, plan: Plan, program: Program, groups: Mapping[str, Communicator]
    ) -> None:
        """`groups` by role, of which those called `tied.*` are used."""
        self._model = model
        self._rank = program.rank
        self._where = program.tp, program.tp_index
        self._clusters: list[tuple[tuple[str, str], TiedCluster, Communicator]] = [
            (model.tied[pair], cluster, groups[f"tied.{pair}.{cluster.chunk}"])
            for pair in range(len(model.tied))
            for cluster in tied_clusters(model, plan, pair)
            if program.rank in cluster.ranks
        ]

    def add(self, reduced: Mapping[str, Tensor]) -> None:
        """Both sides of every pair become their sum, input side first, in place.

        Communication stream, once per step. CommError where a member is gone.
        """
        for (into, out), cluster, group in self._clusters:
            sides = self._side(into, reduced, cluster), self._side(out, reduced, cluster)
            other = _exchange(sides, (cluster.inputs, cluster.outputs), group)
            first, second = (other if side is None else side.reshape(-1) for side in sides)
            total = first + second
            for side in sides:
                if side is not None:
                    side.copy_(total.view(side.shape))

    def _side(
        self, name: str, reduced: Mapping[str, Tensor], cluster: TiedCluster
    ) -> Tensor | None:
        """A view of our chunk of one side; None where another rank holds it."""
        if name not in reduced:
            return None
        layout = self._model.layout(name)
        return slice_of(layout, reduced[name], cluster.chunk, cluster.num_chunks, *self._where)


def _exchange(
    sides: tuple[Tensor | None, Tensor | None],
    holders: tuple[Sequence[int], Sequence[int]],
    group: Communicator,
) -> Tensor:
    """The side that we lack, flat; nothing where we hold both.

    The first holder of a side gives it to every member that lacks it. Who lacks one holds the
    other, so each member gets at most one message.
    """
    own = next(side for side in sides if side is not None)
    nothing = own.new_empty(0)
    parts = [nothing] * group.degree
    sizes = [0] * group.degree
    for side, ranks in zip(sides, holders, strict=True):
        giver = group.ranks.index(ranks[0])
        if side is None:
            sizes[giver] = own.numel()
        elif group.index == giver:
            for at, rank in enumerate(group.ranks):
                if rank not in ranks:
                    parts[at] = side.reshape(-1)
    received = group.all_to_all(parts, sizes)
    return next((part for part in received if part.numel()), nothing)
