"""Seconds of everything in a plan: compute by group and lengths, tensors by the pair of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from resihp.compiler.cluster import Cluster, Health
from resihp.compiler.costs import CostModel, Lengths, StageCost
from resihp.compiler.facts import num_parameters
from resihp.compiler.links import Crossing, crossing, reduce_seconds
from resihp.ir.model import Group, LayerRange, ModelShape, Op

__all__ = ["Pricing"]

_ADAMW_BYTES_PER_PARAMETER = 28
"""fp32: parameter, gradient and both moments are read, all but the gradient written back."""


class Pricing:
    """Prices of one job in one state of health. Answers are kept, so equal groups cost one look."""

    def __init__(
        self, shape: ModelShape, costs: CostModel, cluster: Cluster, health: Health
    ) -> None:
        self.shape = shape
        self.costs = costs
        self.cluster = cluster
        self.health = health
        self._stages: dict[tuple[LayerRange, int], StageCost] = {}
        self._crossings: dict[
            tuple[tuple[int, ...], tuple[int, ...], int, bool | None], Crossing
        ] = {}

    def speed(self, group: Group) -> float:
        """That of the group's slowest member."""
        return min(self.health.speed_of(rank) for rank in group.ranks)

    def stage(self, layers: LayerRange, tp: int) -> StageCost:
        """Costs of a stage on healthy devices."""
        key = layers, tp
        if key not in self._stages:
            self._stages[key] = self.costs.stage(layers, self.shape.layers, tp)
        return self._stages[key]

    def compute_s(self, group: Group, layers: LayerRange, op: Op, lengths: Lengths) -> float:
        """One F, B, W or BW of the stage that holds `layers`."""
        return self.stage(layers, group.tp).of(op).seconds(lengths, self.speed(group))

    def crossing(
        self, sender: Group, receiver: Group, tokens: int, *, cut: bool | None = None
    ) -> Crossing:
        """An activation, or its gradient, from group to group; `cut` or whole, None: the faster."""
        key = sender.ranks, receiver.ranks, tokens, cut
        if key not in self._crossings:
            num_bytes = tokens * self.costs.boundary_bytes_per_token
            self._crossings[key] = crossing(self.cluster, self.health, *key[:2], num_bytes, cut=cut)
        return self._crossings[key]

    def scatter(self, tokens: int) -> Callable[[Group, Group], bool]:
        """The choice for `lower`: tensors of `tokens` are cut where that is faster."""
        return lambda sender, receiver: self.crossing(sender, receiver, tokens).cut

    def reduce_s(self, groups: Iterable[Group], layers: LayerRange) -> float:
        """Summing the gradients of a stage over the `groups` that hold it.

        Where the smallest group has fewer ranks than others, each of them has more to send, but
        fewer of them share the adapters of a node.
        """
        holders = list(groups)
        degrees = [group.tp for group in holders]
        num_bytes = self.costs.reduce_bytes(layers, self.shape.layers, min(degrees))
        per_node = max(1, self.cluster.cluster.gpus_per_node * min(degrees) // max(degrees))
        node_of = self.cluster.node_of
        nodes = {node_of(rank) for group in holders for rank in (group.ranks[0], group.ranks[-1])}
        return reduce_seconds(
            self.cluster, len(holders), num_bytes, per_node, is_inside_node=len(nodes) == 1
        )

    def step_s(self, group: Group) -> float:
        """AdamW on one member: bound by the memory of the device, whatever its speed."""
        bandwidth = self.cluster.device.memory_gb_per_s
        if bandwidth is None:
            return 0.0
        parameters = sum(num_parameters(self.shape, layers, group.tp) for layers in group.layers)
        return parameters * _ADAMW_BYTES_PER_PARAMETER / (bandwidth * 1e9)
