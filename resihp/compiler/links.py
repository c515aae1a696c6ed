"""What a tensor takes from one TP group to another, and gradients between replicas.

Whole tensors go from member to member. A tensor that is cut crosses once in all, each chunk on its
own pair, and the receivers gather it over the links of their node (section 7 of the paper).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from resihp.compiler.cluster import Cluster, Health, SlowLink

__all__ = ["Crossing", "crossing", "reduce_seconds"]


class Crossing(NamedTuple):
    """The faster of both ways."""

    seconds: float
    """From the send until the whole tensor is at every member of the receiver."""
    cut: bool
    occupied_s: float
    """How long it keeps the links between the two groups from others."""


def crossing(
    cluster: Cluster,
    health: Health,
    sender: Sequence[int],
    receiver: Sequence[int],
    num_bytes: float,
    *,
    cut: bool | None = None,
) -> Crossing:
    """Time of a tensor of `num_bytes` from the ranks `sender` to the ranks `receiver`.

    `cut` forces the way; groups of unequal degree have no choice.
    """
    num_chunks = max(len(sender), len(receiver))
    ways: list[Crossing] = []
    if len(sender) == len(receiver) and (cut is not True or num_chunks == 1):
        seconds, occupied_s = _transfer(cluster, health, sender, receiver, num_bytes, len(sender))
        ways.append(Crossing(seconds, False, occupied_s))
    if num_chunks > 1 and (cut is not False or not ways):
        chunk_bytes = num_bytes / num_chunks
        seconds, occupied_s = _transfer(cluster, health, sender, receiver, chunk_bytes, num_chunks)
        seconds += _gather(cluster, len(receiver), num_bytes)
        ways.append(Crossing(seconds, True, occupied_s))
    return min(ways)


def _transfer(
    cluster: Cluster,
    health: Health,
    sender: Sequence[int],
    receiver: Sequence[int],
    num_bytes: float,
    num_messages: int,
) -> tuple[float, float]:
    """Of `num_messages` messages at once, each of `num_bytes`; and without the latency."""
    here, there = cluster.node_of(sender[0]), cluster.node_of(receiver[0])
    if here == there:
        busiest = num_messages // min(len(sender), len(receiver))
        seconds = cluster.intra_node.seconds(num_bytes * busiest)
        return seconds, seconds - cluster.intra_node.seconds(0)
    per_adapter = -(-num_messages // cluster.cluster.nics_per_node)
    seconds = cluster.inter_node.seconds(num_bytes * per_adapter)
    occupied_s = seconds - cluster.inter_node.seconds(0)
    slow = health.link(here, there)
    if slow is None:
        return seconds, occupied_s
    return seconds * slow.factor + slow.delay_s, occupied_s * slow.factor


def _gather(cluster: Cluster, degree: int, num_bytes: float) -> float:
    """A ring all-gather of a tensor inside a group."""
    if degree == 1:
        return 0.0
    link = cluster.intra_node
    return (degree - 1) * link.seconds(num_bytes / degree)


def reduce_seconds(
    cluster: Cluster,
    num_replicas: int,
    num_bytes: float,
    per_node: float,
    *,
    is_inside_node: bool = False,
    slow: Collection[SlowLink] = (),
) -> float:
    """A ring all-reduce of `num_bytes` per rank over replicas, on different nodes or on one.

    `per_node` ranks of a node do this at once and share its adapters. `slow` are the slow links
    that the ring crosses: each step takes as long as its slowest link does.
    """
    if num_replicas == 1:
        return 0.0
    steps = 2 * (num_replicas - 1)
    if is_inside_node:
        return steps * cluster.intra_node.seconds(num_bytes / num_replicas)
    link = cluster.inter_node
    share = max(1.0, per_node / cluster.cluster.nics_per_node)
    step_s = link.seconds(num_bytes * share / num_replicas)
    return steps * max(step_s, *(each.factor * step_s + each.delay_s for each in slow), 0.0)
