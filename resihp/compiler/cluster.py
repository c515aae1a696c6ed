"""Descriptions of clusters: nodes, devices, links. Of health: what is lost and what is slow.

Bandwidths are those that a collective or a transfer reaches, not those on the data sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from resihp.errors import UserError

__all__ = [
    "CLUSTERS",
    "Cluster",
    "ClusterSize",
    "Device",
    "Health",
    "Link",
    "SlowLink",
    "find_cluster",
]

Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Positive = Annotated[float, Meta(ge=1e-6, le=1e9)]
"""No device or link is outside, and prices stay numbers that add up."""
Share = Annotated[float, Meta(ge=1e-6, le=1.0)]


class ClusterSize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[cluster]`."""

    name: str
    nodes: Count
    gpus_per_node: Count
    nics_per_node: Count = 1
    """Network adapters that the devices of a node share evenly."""


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[device]`: one GPU (or CPU worker)."""

    memory_gib: Positive
    bf16_tflops: Positive
    """Peak of dense matrix products."""
    fp32_tflops: Positive
    linear_efficiency: Share = 0.6
    """Share of the peak that linear layers reach."""
    attention_efficiency: Share = 0.45
    attention_backward_efficiency: Share = 0.4
    memory_gb_per_s: Positive | None = None
    """10^9 bytes a second that the optimizer reaches; None: its update is taken to cost nothing."""

    @property
    def memory_bytes(self) -> int:
        """Capacity."""
        return int(self.memory_gib * (1 << 30))


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[intra_node]` (one device's share of the fabric) and `[inter_node]` (one adapter)."""

    gb_per_s: Positive
    """10^9 bytes a second, one direction."""
    latency_us: Positive

    def seconds(self, num_bytes: float) -> float:
        """Time of one message."""
        return self.latency_us * 1e-6 + num_bytes / (self.gb_per_s * 1e9)


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of equal devices. Rank r is device r % gpus_per_node of node r // gpus_per_node."""

    cluster: ClusterSize
    device: Device
    intra_node: Link
    inter_node: Link

    @property
    def num_devices(self) -> int:
        """In all nodes."""
        return self.cluster.nodes * self.cluster.gpus_per_node

    def node_of(self, rank: int) -> int:
        """The node that `rank` is on."""
        return rank // self.cluster.gpus_per_node


class SlowLink(msgspec.Struct, frozen=True, kw_only=True):
    """All transfers between two nodes take `factor` times as long, and `delay_s` more."""

    nodes: tuple[int, int]
    factor: float = 1.0
    delay_s: float = 0.0


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the devices of a job now."""

    lost: frozenset[int] = frozenset()
    """Ranks that are gone."""
    speed: Mapping[int, float] = {}
    """Throughput of slow ranks relative to a healthy device, in (0, 1]; others have 1."""
    links: tuple[SlowLink, ...] = ()

    def speed_of(self, rank: int) -> float:
        """Relative throughput; 0 for a lost rank."""
        return 0.0 if rank in self.lost else self.speed.get(rank, 1.0)

    def link(self, one: int, other: int) -> SlowLink | None:
        """The slowdown between two nodes, in either direction."""
        return next((link for link in self.links if set(link.nodes) == {one, other}), None)


# NVIDIA's data sheet says 2,039 GB/s of the 80 GB model; four fifths are reached.
_A100 = Device(memory_gib=80, bf16_tflops=312, fp32_tflops=19.5, memory_gb_per_s=1600)

CLUSTERS = {
    cluster.cluster.name: cluster
    for cluster in (
        Cluster(
            # The paper's testbed (section 8.1) names 200 Gb/s HDR and no number of adapters; one
            # a node is assumed here.
            cluster=ClusterSize(name="a100-32x8", nodes=32, gpus_per_node=8, nics_per_node=1),
            device=_A100,
            intra_node=Link(gb_per_s=225, latency_us=8),
            inter_node=Link(gb_per_s=23, latency_us=5),
        ),
        Cluster(
            cluster=ClusterSize(name="a100-2048x8", nodes=2048, gpus_per_node=8, nics_per_node=8),
            device=_A100,
            intra_node=Link(gb_per_s=225, latency_us=8),
            inter_node=Link(gb_per_s=23, latency_us=5),
        ),
        Cluster(
            cluster=ClusterSize(name="cpu-box", nodes=1, gpus_per_node=64),
            device=Device(memory_gib=2, bf16_tflops=0.02, fp32_tflops=0.02),
            intra_node=Link(gb_per_s=1, latency_us=100),
            inter_node=Link(gb_per_s=1, latency_us=100),
        ),
    )
}
"""By name."""


def find_cluster(name: str) -> Cluster:
    """The preset called `name`. Raises UserError that lists them."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    raise UserError(f"cluster {name!r} is no preset ({', '.join(CLUSTERS)}) and no file")
