"""Sum of weight gradients over replicas whose TP degrees may differ, in a fixed order.

The unit is chunk c of N, N being the largest TP degree among the replicas of the stage: each
replica has exactly one member that holds chunk c of every sharded tensor (and all replicated
ones). Those members form a group. Inside it every member owns one slice: it gets that slice of
everybody's partial sums, adds them along the fixed tree over (home replica, micro-batch), and
sends the result to all. So the bits depend neither on who ran what nor on the world size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from resihp.executor.flat import split_flat
from resihp.executor.gradients import GradientTree, Node, tree_sum
from resihp.executor.groups import Communicator
from resihp.executor.layouts import slice_of
from resihp.executor.model import Model
from resihp.ir.model import Op, Plan
from resihp.ir.program import Program

__all__ = ["ReduceGroup", "Reducer", "hosted_nodes", "reduce_groups", "run_by"]


class ReduceGroup(NamedTuple):
    """The ranks, in order of replica, that hold chunk `chunk` of `num_chunks` of a stage."""

    chunk: int
    num_chunks: int
    ranks: tuple[int, ...]


def reduce_groups(plan: Plan, pp: int) -> list[ReduceGroup]:
    """Every reduction group at position `pp` of the pipeline, in order of chunk."""
    groups = sorted(
        (group for group in plan.groups if group.pp == pp), key=lambda group: group.replica
    )
    num_chunks = max(group.tp for group in groups)
    return [
        ReduceGroup(chunk, num_chunks, tuple(g.ranks[chunk * g.tp // num_chunks] for g in groups))
        for chunk in range(num_chunks)
    ]


def hosted_nodes(
    microbatches: Sequence[tuple[int, int]], num_replicas: int, num_microbatches: int
) -> list[tuple[int, Node]]:
    """Nodes of the gradient trees that one rank ends up with, from what it runs.

    `microbatches` are (home, number) pairs. All members know it of each other from the plan.
    """
    tree = GradientTree(num_replicas, num_microbatches)
    for home, number in microbatches:
        tree.add(home, number, {})
    return [(home, node) for home in range(num_replicas) for node in tree.take_partials(home)]


def run_by(program: Program) -> list[tuple[int, int]]:
    """(home, number) of every micro-batch whose weight gradients a program computes."""
    return [
        (instr.home, instr.microbatch)
        for instr in program.instrs
        if instr.op in (Op.W, Op.BW) and instr.home is not None and instr.microbatch is not None
    ]


class Reducer:
    """Reduces the gradients of one rank; built once per generation."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        program: Program,
        communicators: Mapping[int, Communicator],
        nodes_of_member: Mapping[int, list[tuple[int, Node]]],
    ) -> None:
        """`communicators` by chunk held here; `nodes_of_member` by rank of the stage."""
        self._model = model
        self._program = program
        self._groups = {
            group.chunk: group
            for group in reduce_groups(plan, program.group.pp)
            if group.chunk in communicators
        }
        self._communicators = communicators
        self._nodes = nodes_of_member
        self._shape = (plan.mesh.dp, plan.batch.microbatches)

    def reduce(self, tree: GradientTree, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradient of the global batch, local shards named and shaped as `like`.

        Empties the tree. Runs on the communication stream. CommError where a member is gone.
        """
        num_replicas = self._shape[0]
        partials = [
            ((home, node), grads)
            for home in range(num_replicas)
            for node, grads in tree.take_partials(home).items()
        ]
        assert [key for key, _ in partials] == self._nodes[self._program.rank]
        reduced = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        for chunk, group in self._groups.items():
            flats = [self._flatten(grads, group) for _, grads in partials]
            self._unflatten(self._reduce_chunk(chunk, group, flats), reduced, group)
        return reduced

    def _views(self, tensors: Mapping[str, Tensor], group: ReduceGroup) -> list[Tensor]:
        """What the group sums: its chunk of sharded tensors, replicated ones whole."""
        where = group.chunk, group.num_chunks, self._program.tp, self._program.tp_index
        return [
            slice_of(self._model.layout(name), tensor, *where)
            for name, tensor in sorted(tensors.items())
        ]

    def _flatten(self, grads: Mapping[str, Tensor], group: ReduceGroup) -> Tensor:
        return torch.cat([view.reshape(-1) for view in self._views(grads, group)])

    def _unflatten(self, flat: Tensor, into: Mapping[str, Tensor], group: ReduceGroup) -> None:
        views = self._views(into, group)
        parts = split_flat(flat, [view.numel() for view in views])
        for view, part in zip(views, parts, strict=True):
            view.copy_(part.view(view.shape))

    def _reduce_chunk(self, chunk: int, group: ReduceGroup, flats: list[Tensor]) -> Tensor:
        """Everybody's partial sums of one chunk, added in the order of the tree."""
        communicator = self._communicators[chunk]
        degree = communicator.degree
        length = flats[0].numel()
        piece = -(-length // degree)
        padded = [torch.nn.functional.pad(flat, (0, piece * degree - length)) for flat in flats]
        outgoing = [
            torch.cat([flat[member * piece : (member + 1) * piece] for flat in padded])
            for member in range(degree)
        ]
        nodes = [self._nodes[rank] for rank in group.ranks]
        received = communicator.all_to_all(outgoing, [piece * len(held) for held in nodes])
        parts = {
            key: part
            for held, block in zip(nodes, received, strict=True)
            for key, part in zip(held, split_flat(block, [piece] * len(held)), strict=True)
        }
        mine = _sum_in_order(parts, *self._shape)
        return communicator.all_gather(mine).reshape(-1)[:length]


def _sum_in_order(
    parts: Mapping[tuple[int, Node], Tensor], num_replicas: int, num_microbatches: int
) -> Tensor:
    """Complete each home's tree from its partial nodes, then add the homes in order."""
    tree = GradientTree(num_replicas, num_microbatches)
    for (home, node), part in parts.items():
        tree.add_partial(home, node, {"": part.clone()})
    return tree_sum([tree.take(home)[""] for home in range(num_replicas)])
