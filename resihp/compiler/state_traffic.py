"""What a reconfiguration sends over which links, and about how long that takes.

All moves go at once. A device sends and receives over its share of the node's fabric, or over one
network adapter; the devices of a node share its adapters. So the busiest device, node or pair of
nodes sets the time, and every message adds its latency at both ends.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from resihp.compiler.facts import move_bytes
from resihp.compiler.pricing import Pricing
from resihp.ir.model import Load, Plan
from resihp.ir.reshard import ShardLoad, ShardMove, loads, transfers

__all__ = ["StateTraffic", "state_traffic"]


class StateTraffic(NamedTuple):
    """State on its way from one plan to the next."""

    seconds: float
    """Until all moves are done; what is read from a saved version is not in it."""
    num_bytes: int
    """Of all moves between ranks."""
    read_bytes: int
    """From a saved version."""
    by_ranks: dict[tuple[int, int], int]
    """Bytes by source and target."""
    by_nodes: dict[tuple[int, int], int]
    """Bytes that leave their node, by its number and that of the target's."""


def state_traffic(previous: Plan, plan: Plan, pricing: Pricing) -> StateTraffic:
    """Predicted time and bytes of the reconfiguration of `plan`, which is verified to follow
    `previous`, with those of every pair of ranks and of nodes.
    """
    node_of = pricing.cluster.node_of
    by_ranks: Counter[tuple[int, int]] = Counter()
    num_messages: Counter[tuple[int, int]] = Counter()
    size = _Sizes(plan)
    for move in transfers(previous, plan):
        by_ranks[move.source, move.target] += size.of(move)
        num_messages[move.source, move.target] += 1
    reads = any(isinstance(line, Load) for line in plan.reconfigure)
    by_nodes: Counter[tuple[int, int]] = Counter()
    for (source, target), num_bytes in by_ranks.items():
        nodes = node_of(source), node_of(target)
        if nodes[0] != nodes[1]:
            by_nodes[nodes] += num_bytes
    return StateTraffic(
        seconds=max(
            _busiest_device(by_ranks, num_messages, pricing),
            _busiest_node(by_nodes, pricing),
            0.0,
        ),
        num_bytes=by_ranks.total(),
        read_bytes=sum(map(size.of, loads(previous, plan))) if reads else 0,
        by_ranks=dict(sorted(by_ranks.items())),
        by_nodes=dict(sorted(by_nodes.items())),
    )


class _Sizes:
    """Bytes of moves; those of inner layers are all alike."""

    def __init__(self, plan: Plan) -> None:
        self._model = plan.model
        self._known: dict[tuple[bool, bool, bool, int, int], int] = {}

    def of(self, move: ShardMove | ShardLoad) -> int:
        """Parameters and moments of one move."""
        is_first, is_last = move.layer == 0, move.layer == self._model.layers - 1
        key = is_first, is_last, move.replicated, move.chunk, move.num_chunks
        if key not in self._known:
            self._known[key] = move_bytes(self._model, move)
        return self._known[key]


def _busiest_device(
    by_ranks: Counter[tuple[int, int]], num_messages: Counter[tuple[int, int]], pricing: Pricing
) -> float:
    """Each device sends what it has to one after the other, and receives likewise."""
    cluster = pricing.cluster
    busy_s: dict[tuple[int, bool], float] = {}
    for (source, target), num_bytes in by_ranks.items():
        is_near = cluster.node_of(source) == cluster.node_of(target)
        link = cluster.intra_node if is_near else cluster.inter_node
        count = num_messages[source, target]
        seconds = count * link.seconds(0) + num_bytes / (link.gb_per_s * 1e9)
        for end in ((source, True), (target, False)):
            busy_s[end] = busy_s.get(end, 0.0) + seconds
    return max(busy_s.values(), default=0.0)


def _busiest_node(by_nodes: Counter[tuple[int, int]], pricing: Pricing) -> float:
    """All adapters of a node together, in and out; slow pairs of nodes one by one."""
    cluster, health = pricing.cluster, pricing.health
    link = cluster.inter_node
    per_second = link.gb_per_s * 1e9 * cluster.cluster.nics_per_node
    busy_s: dict[tuple[int, bool], float] = {}
    slowest = 0.0
    for (here, there), num_bytes in by_nodes.items():
        seconds = num_bytes / per_second
        for end in ((here, True), (there, False)):
            busy_s[end] = busy_s.get(end, link.seconds(0)) + seconds
        slow = health.link(here, there)
        if slow is not None:
            slowest = max(slowest, slow.delay_s + slow.factor * (link.seconds(0) + seconds))
    return max(slowest, *busy_s.values()) if busy_s else 0.0
