"""Sums of one stage's weight gradients: over micro-batches where they run, then over replicas.

A reducer takes each micro-batch's gradients as W makes them and gives the gradient of the global
batch at REDUCE_GRADS. The TP degrees of the replicas may differ: the unit is chunk c of N, N being
the largest degree, and group c has of each replica the one member that holds chunk c
(`resihp.executor.shards`).

- `OrderedReducer`, numerics `bitwise`: partial sums are kept along the fixed tree over (home
  replica, micro-batch). Every member of a group owns one slice: it gets that slice of everybody's
  partial sums, adds them in the order of the tree, and sends the result to all. So the bits
  depend neither on who ran what nor on the world size.
- `FastReducer`, numerics `fast`: one sum per rank, in order of arrival, and an all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from resihp.executor.device.interface import Communicator
from resihp.executor.flat import split_flat, used_here
from resihp.executor.gradients import GradientTree, Node, tree_sum
from resihp.executor.held import SumSet
from resihp.executor.model import Key
from resihp.executor.shards import StageShards
from resihp.ir.model import Op, Plan
from resihp.ir.placement import placement_of

__all__ = ["FastReducer", "OrderedReducer", "Reducer", "hosted_nodes", "weights_run_by"]


class Reducer(Protocol):
    """Gradient sums of one stage on one rank, for the life of a generation."""

    def add(self, key: Key, grads: dict[str, Tensor]) -> None:
        """Compute stream: one micro-batch's gradients, which belong to the reducer from now on."""
        ...

    def sums(self) -> Mapping[str, Tensor] | None:
        """Compute stream: where W may add a micro-batch's gradients instead of calling `add`.

        fp32 in local shapes, valid for one micro-batch; None where gradients must come apart.
        `added` says that it is done.
        """
        ...

    def added(self, key: Key) -> None:
        """Compute stream: the gradients of a micro-batch are in what `sums` gave."""
        ...

    def reduce(self) -> dict[str, Tensor]:
        """Communication stream: the gradient of the global batch, fp32 in local shapes.

        It stays valid until the next iteration adds to the reducer or reduces. CommError where a
        member is gone.
        """
        ...

    def discard(self) -> None:
        """Drop all sums, as after an aborted iteration."""
        ...

    def held(self) -> list[SumSet]:
        """Streams idle: the sums of the micro-batches that are complete here, as few as they are.

        Their tensors are read alone, and valid after `discard` too, until W adds again.
        """
        ...

    def put(self, sets: Sequence[SumSet]) -> None:
        """Before the first `add` of an iteration: what another reducer held; it stays as it is."""
        ...


def weights_run_by(plan: Plan, stage: int) -> dict[int, list[Key]]:
    """(home, number) of the micro-batches whose weight gradients of `stage` each replica computes.

    Replicas without a group there are left out.
    """
    placement = placement_of(plan)
    pp = placement.pp[stage]
    found: dict[int, list[Key]] = {group.replica: [] for group in plan.groups if group.pp == pp}
    for stream in plan.streams:
        if stream.pp != pp:
            continue
        for instr in stream.body:
            if instr.op not in (Op.W, Op.BW) or placement.stage_of(pp, instr) != stage:
                continue
            assert instr.microbatch is not None
            for replica in stream.replicas:
                home = replica if instr.home is None else instr.home
                found[replica].append((home, instr.microbatch))
    return found


def hosted_nodes(
    microbatches: Sequence[Key], num_replicas: int, num_microbatches: int
) -> list[tuple[int, Node]]:
    """Nodes of the gradient trees that one rank ends up with, from what it runs.

    All members know it of each other from the plan.
    """
    tree = GradientTree(num_replicas, num_microbatches)
    for home, number in microbatches:
        tree.add(home, number, {})
    return [(home, node) for home in range(num_replicas) for node in tree.take_partials(home)]


class OrderedReducer:
    """Sums in a fixed order (see the module)."""

    def __init__(
        self,
        shards: StageShards,
        groups: Mapping[int, Communicator],
        gather: Communicator,
        nodes: Mapping[int, Sequence[tuple[int, Node]]],
        num_replicas: int,
        num_microbatches: int,
    ) -> None:
        """`groups` by chunk held here; `nodes` by any rank of the groups (`hosted_nodes`)."""
        self._shards = shards
        self._groups = groups
        self._gather = gather
        self._nodes = nodes
        self._shape = num_replicas, num_microbatches
        self._buckets = shards.buckets([*shards.cut, *shards.replicated])
        self._tree = GradientTree(num_replicas, num_microbatches)
        self._reduced: dict[str, Tensor] | None = None
        self._nothing = torch.empty(0, device=shards.device)
        self._is_reduced = False
        """The sums are those of an iteration that was reduced; kept until its step."""
        self._is_alone = not shards.copied and all(group.degree == 1 for group in groups.values())

    def add(self, key: Key, grads: dict[str, Tensor]) -> None:
        """See `Reducer`."""
        if self._is_reduced:
            self.discard()
        self._tree.add(*key, {name: grad.float() for name, grad in grads.items()})

    def sums(self) -> None:
        """See `Reducer`: the tree adds whole micro-batches, in its own order."""

    def added(self, key: Key) -> None:
        """See `Reducer`: never asked."""
        raise AssertionError(f"micro-batch {key} was added behind the tree")

    def discard(self) -> None:
        """See `Reducer`."""
        self._tree.discard_all()
        self._is_reduced = False

    def held(self) -> list[SumSet]:
        """See `Reducer`: one for each node of the trees."""
        return [
            SumSet(frozenset((home, number) for number in self._tree.leaves(node)), grads)
            for home in range(self._shape[0])
            for node, grads in self._tree.partials(home)
        ]

    def put(self, sets: Sequence[SumSet]) -> None:
        """See `Reducer`."""
        for keys, sums in sets:
            numbers = [number for _, number in keys]
            ((home, _), *_) = keys
            level = (min(numbers) ^ max(numbers)).bit_length()
            # Two of them are never one: the tree that held them would have added them.
            self._tree.add_partial(home, Node(level, min(numbers) >> level), dict(sums))

    def reduce(self) -> dict[str, Tensor]:
        """See `Reducer`."""
        if self._is_alone:
            return self._sum_alone()
        num_replicas = self._shape[0]
        partials = [
            ((home, node), grads)
            for home in range(num_replicas)
            for node, grads in self._tree.partials(home)
        ]
        self._is_reduced = True
        for _, grads in partials:
            used_here(grads.values())
        for group in self._groups.values():
            mine = self._nodes[group.ranks[group.index]]
            assert [key for key, _ in partials] == mine, "other micro-batches than the plan's"
        if self._reduced is None:
            self._reduced = self._shards.empty()
        for names in self._buckets:
            flats = {
                chunk: self._reduce_chunk(names, chunk, group, [grads for _, grads in partials])
                for chunk, group in self._groups.items()
            }
            self._shards.unflatten(flats, names, self._reduced, self._gather)
        return self._reduced

    def _sum_alone(self) -> dict[str, Tensor]:
        """Everything ran here, with whole chunks: no exchange and no copy."""
        if self._shape[0] == 1:  # no other replica could go on with what is here
            return self._tree.take(0)
        self._is_reduced = True
        sums = [self._tree.whole(home) for home in range(self._shape[0])]
        for grads in sums:
            used_here(grads.values())
        return {name: tree_sum([grads[name] for grads in sums]) for name in sums[0]}

    def _reduce_chunk(
        self,
        names: Sequence[str],
        chunk: int,
        group: Communicator,
        partials: Sequence[Mapping[str, Tensor]],
    ) -> Tensor:
        """Everybody's partial sums of one bucket of one chunk, added in the order of the tree."""
        degree = group.degree
        flats = [self._shards.flatten(grads, names, chunk, degree) for grads in partials]
        length = self._shards.length(names, chunk)
        piece = -(-length // degree)
        outgoing = [
            _cat([flat.narrow(0, at * piece, piece) for flat in flats] or [self._nothing])
            for at in range(degree)
        ]
        nodes = [self._nodes[rank] for rank in group.ranks]
        received = group.all_to_all(outgoing, [piece * len(held) for held in nodes])
        if degree == 1:  # it may be what the tree still holds
            received = [block.clone() for block in received]
        parts = {
            key: part
            for held, block in zip(nodes, received, strict=True)
            for key, part in zip(held, split_flat(block, [piece] * len(held)), strict=True)
        }
        mine = _sum_in_order(parts, *self._shape)
        return group.all_gather(mine).reshape(-1)[:length]


class FastReducer:
    """One sum per rank and an all-reduce (see the module).

    Replicated tensors are added in member order instead where there are several chunks: a ring's
    order depends on the length of what it sums, and two chunks must not give other bits.

    On the CPU a copy of the sums is reduced, so that they are there until the next iteration. A
    GPU has no memory to spare for that: there they are reduced where they are.
    """

    def __init__(
        self, shards: StageShards, groups: Mapping[int, Communicator], gather: Communicator
    ) -> None:
        """`groups` by chunk held here."""
        self._shards = shards
        self._groups = groups
        self._gather = gather
        self._flat, self._sums = shards.flat_buffer()
        self._out, self._out_sums = self._flat, self._sums
        """What is reduced."""
        if torch.device(shards.device).type == "cpu":
            self._out, self._out_sums = shards.flat_buffer()
        self._in_place = len(shards.chunks) == 1 and not shards.copied
        """What is cut is exactly one chunk, so that it can be reduced where it is."""
        self._reduced = self._out_sums if self._in_place else shards.empty()
        self._num_added = 0
        self._keys: set[Key] = set()
        """Micro-batches that are in the sums whole; none once they are reduced in their place."""
        self._is_reduced = False

    def add(self, key: Key, grads: dict[str, Tensor]) -> None:
        """See `Reducer`."""
        for name, total in self.sums().items():
            total.add_(grads[name])
        self.added(key)

    def sums(self) -> Mapping[str, Tensor]:
        """See `Reducer`."""
        self._begin()
        self._num_added += 1
        return self._sums

    def _begin(self) -> None:
        """Zeros, where nothing of this iteration is there yet."""
        if self._is_reduced:
            self.discard()
        if not self._num_added:
            self._flat.zero_()

    def added(self, key: Key) -> None:
        """See `Reducer`."""
        self._keys.add(key)

    def discard(self) -> None:
        """See `Reducer`."""
        self._num_added = 0
        self._keys.clear()
        self._is_reduced = False

    def held(self) -> list[SumSet]:
        """See `Reducer`: all in one; none where one was not added to its end."""
        if not self._keys or len(self._keys) != self._num_added:
            return []
        return [SumSet(frozenset(self._keys), self._sums)]

    def put(self, sets: Sequence[SumSet]) -> None:
        """See `Reducer`."""
        for keys, sums in sets:
            for name, total in self.sums().items():
                total.add_(sums[name])
            self._num_added += len(keys) - 1
            self._keys |= keys

    def reduce(self) -> dict[str, Tensor]:
        """See `Reducer`."""
        self._begin()
        self._is_reduced = True
        if self._out is self._flat:
            self._keys.clear()
        else:
            self._out.copy_(self._flat)
        shards = self._shards
        if shards.num_chunks == 1:
            self._groups[0].all_reduce_(self._out)
            return self._reduced
        if self._in_place:
            ((chunk, group),) = self._groups.items()
            group.all_reduce_(self._out[: shards.length(shards.cut, chunk)])
        else:
            self._reduce_copied_out()
        self._reduce_replicated()
        return self._reduced

    def _reduce_copied_out(self) -> None:
        shards = self._shards
        for names in shards.buckets(shards.cut):
            flats: dict[int, Tensor] = {}
            for chunk, group in self._groups.items():
                flats[chunk] = shards.flatten(self._out_sums, names, chunk)
                group.all_reduce_(flats[chunk])
            shards.unflatten(flats, names, self._reduced, self._gather)

    def _reduce_replicated(self) -> None:
        names = self._shards.replicated
        if not names:
            return
        mine = _cat([self._out_sums[name].reshape(-1) for name in names])
        for group in self._groups.values():
            total = tree_sum(list(group.all_gather(mine)))
            parts = split_flat(total, [self._sums[name].numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                self._reduced[name].copy_(part.view(self._sums[name].shape))


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _sum_in_order(
    parts: Mapping[tuple[int, Node], Tensor], num_replicas: int, num_microbatches: int
) -> Tensor:
    """Complete each home's tree from its partial nodes, then add the homes in order.

    The parts are given up.
    """
    tree = GradientTree(num_replicas, num_microbatches)
    for (home, node), part in parts.items():
        tree.add_partial(home, node, {"": part})
    sums = [tree.take(home)[""] for home in range(num_replicas)]
    return sums[0] if len(sums) == 1 else tree_sum(sums)
