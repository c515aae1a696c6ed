"""Sums of gradients whose bits do not depend on who computed what, or when.

Floating-point addition is not associative, so the order of additions is fixed instead: over the
micro-batches of a logical replica, and then over the logical replicas, along one binary tree that
depends on their numbers only. Node (level, number) of the tree is the sum of leaves
`number * 2**level` up to the next such multiple, cut at the number of leaves; where the right
child has no leaves, the left one passes through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GradientTree", "Node", "tree_sum"]


class Node(NamedTuple):
    """A node of the tree over the micro-batches of one replica; level 0 are the leaves."""

    level: int
    number: int


class GradientTree:
    """Gradients of one stage, added per logical replica in any order of arrival.

    In order of number, at most about log2(num_microbatches) + 1 partial sums per replica are
    alive; out of order, as many as there are gaps. Where the micro-batches of a replica ran on
    several ranks, each holds part of the tree: `take_partials` there and `add_partial` at one
    place give the same bits as if all had run there.
    """

    def __init__(self, num_replicas: int, num_microbatches: int) -> None:
        assert num_replicas > 0
        assert num_microbatches > 0
        self.num_microbatches = num_microbatches
        self._root = Node((num_microbatches - 1).bit_length(), 0)
        self._partials: list[dict[Node, dict[str, Tensor]]] = [{} for _ in range(num_replicas)]

    @property
    def num_partials(self) -> int:
        """Partial sums alive now, over all replicas."""
        return sum(len(partials) for partials in self._partials)

    def add(self, home: int, micro_batch: int, grads: dict[str, Tensor]) -> None:
        """Add one micro-batch; its tensors belong to the tree from now on and will change."""
        assert 0 <= micro_batch < self.num_microbatches, f"micro-batch {micro_batch}"
        self.add_partial(home, Node(0, micro_batch), grads)

    def add_partial(self, home: int, node: Node, grads: dict[str, Tensor]) -> None:
        """Add the sum of a node's leaves, as `add` does; nothing below the node may be here."""
        partials = self._partials[home]
        assert not any(_overlap(node, other) for other in partials), f"{home}: {node} added twice"
        while node != self._root:
            sibling = Node(node.level, node.number ^ 1)
            if sibling.number << sibling.level < self.num_microbatches:
                other = partials.pop(sibling, None)
                if other is None:
                    break
                assert other.keys() == grads.keys()
                for name, grad in grads.items():
                    grad.add_(other[name])
            node = Node(node.level + 1, node.number >> 1)
        partials[node] = grads

    def take(self, home: int) -> dict[str, Tensor]:
        """The sum over all micro-batches of replica `home`, which the tree gives up."""
        grads = self.whole(home)
        self._partials[home].clear()
        return grads

    def whole(self, home: int) -> dict[str, Tensor]:
        """The same, which stays here."""
        partials = self._partials[home]
        assert set(partials) == {self._root}, f"replica {home}: only {sorted(partials)} are here"
        return partials[self._root]

    def take_partials(self, home: int) -> dict[Node, dict[str, Tensor]]:
        """What is here of replica `home`'s tree, as few nodes as possible, given up in order."""
        partials = self._partials[home]
        taken = {node: partials[node] for node in sorted(partials)}
        partials.clear()
        return taken

    def partials(self, home: int) -> list[tuple[Node, dict[str, Tensor]]]:
        """The same, which stays here."""
        partials = self._partials[home]
        return [(node, partials[node]) for node in sorted(partials)]

    def leaves(self, node: Node) -> range:
        """The micro-batches whose sum `node` is."""
        first = node.number << node.level
        return range(first, min(first + (1 << node.level), self.num_microbatches))

    def discard_all(self) -> None:
        """Drop everything, as after an aborted iteration."""
        for partials in self._partials:
            partials.clear()


def _overlap(a: Node, b: Node) -> bool:
    """Whether one of the nodes is the other or lies below it."""
    level = max(a.level, b.level)
    return a.number >> (level - a.level) == b.number >> (level - b.level)


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of `parts` along the fixed tree, a new tensor; `parts` stay as they are.

    Its bits depend on the values and their order in `parts` only, elementwise, so a slice of the
    sum is the sum of the slices.
    """
    assert parts
    if len(parts) == 1:
        return parts[0].clone()
    if len(parts) == 2:
        return parts[0] + parts[1]
    split = 1 << ((len(parts) - 1).bit_length() - 1)
    left = tree_sum(parts[:split])
    return left.add_(parts[-1] if len(parts) - split == 1 else tree_sum(parts[split:]))
