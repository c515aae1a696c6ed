"""Gradients that replicas sum, in bytes from node to node: rings over the holders of each stage."""

from __future__ import annotations

from collections.abc import Iterator

from resihp.compiler.pricing import Pricing
from resihp.ir.model import Group, LayerRange, Level, Plan
from resihp.ir.placement import placement_of

__all__ = ["bytes_between_members", "reduced_between_nodes"]


def reduced_between_nodes(plan: Plan, pricing: Pricing) -> dict[tuple[int, int], float]:
    """Bytes from node to node in one iteration; inside a node under (n, n). A schedule has none.

    In a ring all-reduce over R holders each sends 2 (R - 1) / R of what is summed to the next.
    """
    total: dict[tuple[int, int], float] = {}
    node_of = pricing.cluster.node_of
    for holders, layers in _holders(plan):
        degree = min(group.tp for group in holders)
        summed = degree * pricing.costs.reduce_bytes(layers, plan.model.layers, degree)
        share = 2 * (len(holders) - 1) / len(holders)
        for sender, receiver in zip(holders, [*holders[1:], holders[0]], strict=True):
            for source, target, num_bytes in bytes_between_members(sender, receiver, summed):
                link = node_of(source), node_of(target)
                total[link] = total.get(link, 0.0) + share * num_bytes
    return total


def _holders(plan: Plan) -> Iterator[tuple[list[Group], LayerRange]]:
    """The groups that hold each stage, where there are two or more."""
    if plan.level is not Level.PLAN:
        return
    by_position: dict[int, list[Group]] = {}
    for group in sorted(plan.groups, key=lambda group: group.replica):
        by_position.setdefault(group.pp, []).append(group)
    placement = placement_of(plan)
    for pp, layers in zip(placement.pp, placement.layers, strict=True):
        if len(by_position[pp]) > 1:
            yield by_position[pp], layers


def bytes_between_members(
    sender: Group, receiver: Group, num_bytes: float
) -> Iterator[tuple[int, int, float]]:
    """(rank, rank, bytes) of `num_bytes` in all: each chunk goes on its own pair."""
    num_pairs = max(sender.tp, receiver.tp)
    for chunk in range(num_pairs):
        yield (
            sender.ranks[chunk * sender.tp // num_pairs],
            receiver.ranks[chunk * receiver.tp // num_pairs],
            num_bytes / num_pairs,
        )
