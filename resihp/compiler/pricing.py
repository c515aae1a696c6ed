"""Seconds of everything in a plan: compute by group and lengths, tensors by the pair of groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from resihp.compiler.cluster import Cluster, Health, SlowLink
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
        self._stages: dict[tuple[LayerRange, int, bool], StageCost] = {}
        self._crossings: dict[
            tuple[tuple[int, ...], tuple[int, ...], int, bool | None], Crossing
        ] = {}

    def speed(self, group: Group) -> float:
        """That of the group's slowest member."""
        return min(self.health.speed_of(rank) for rank in group.ranks)

    def stage(self, layers: LayerRange, tp: int, *, recomputes: bool = False) -> StageCost:
        """Costs of a stage on healthy devices; B computes the forward again if it `recomputes`."""
        key = layers, tp, recomputes
        if key not in self._stages:
            cost = self.costs.stage(layers, self.shape.layers, tp)
            self._stages[key] = cost.recomputed if recomputes else cost
        return self._stages[key]

    def compute_s(
        self,
        group: Group,
        layers: LayerRange,
        op: Op,
        lengths: Lengths,
        *,
        recomputes: bool = False,
    ) -> float:
        """One F, B, W or BW of the stage that holds `layers`."""
        cost = self.stage(layers, group.tp, recomputes=recomputes)
        return cost.of(op).seconds(lengths, self.speed(group))

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

    def busy(self, groups: Iterable[Group]) -> Counter[int]:
        """How many ranks of each node are in `groups`, all those of a plan."""
        return Counter(map(self.cluster.node_of, chain.from_iterable(g.ranks for g in groups)))

    def reduce_s(
        self, groups: Iterable[Group], layers: LayerRange, busy: Mapping[int, int] | None = None
    ) -> float:
        """Summing the gradients of a stage over the `groups` that hold it, in a ring.

        The ranks of a node that compute share its adapters, as their stages end at about the same
        time; `busy` has their number, and without it all that are not lost do. Where the smallest
        group has fewer ranks than others, each of them has more to send, but fewer of them share
        the adapters.
        """
        holders = list(groups)
        degrees = [group.tp for group in holders]
        num_bytes = self.costs.reduce_bytes(layers, self.shape.layers, min(degrees))
        node_of = self.cluster.node_of
        ring = [node_of(group.ranks[0]) for group in holders]
        nodes = {*ring, *(node_of(group.ranks[-1]) for group in holders)}
        most = max((self._alive(node) if busy is None else busy[node]) for node in nodes)
        return reduce_seconds(
            self.cluster,
            len(holders),
            num_bytes,
            max(1.0, most * min(degrees) / max(degrees)),
            is_inside_node=len(nodes) == 1,
            slow=self._crossed(ring),
        )

    def _alive(self, node: int) -> int:
        """Ranks of a node that are not lost."""
        lost = sum(self.cluster.node_of(rank) == node for rank in self.health.lost)
        return self.cluster.cluster.gpus_per_node - lost

    def _crossed(self, ring: Sequence[int]) -> list[SlowLink]:
        """Slow links between nodes that follow each other."""
        if not self.health.links:
            return []
        pairs = zip(ring, (*ring[1:], ring[0]), strict=True)
        links = (self.health.link(*pair) for pair in dict.fromkeys(pairs))
        return [link for link in links if link is not None]

    def step_s(self, group: Group) -> float:
        """AdamW on one member: bound by the memory of the device, whatever its speed."""
        bandwidth = self.cluster.device.memory_gb_per_s
        if bandwidth is None:
            return 0.0
        parameters = sum(num_parameters(self.shape, layers, group.tp) for layers in group.layers)
        return parameters * _ADAMW_BYTES_PER_PARAMETER / (bandwidth * 1e9)
