"""Times between groups, from the figures of the cluster."""

from __future__ import annotations

import pytest

from resihp.compiler.cluster import CLUSTERS, Cluster, ClusterSize, Health, Link, SlowLink
from resihp.compiler.links import crossing, reduce_seconds

A100 = CLUSTERS["a100-32x8"]
HEALTHY = Health()
ACTIVATION = 8192 * 5120 * 2  # 13B, 8,192 tokens in bf16: 84 MB
NODE0, NODE0_OTHER, NODE1 = (0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)


def test_through_one_adapter_a_cut_tensor_is_nearly_four_times_as_fast():
    """84 MB: 14.6 ms where four members send it whole, 3.9 ms where it crosses once."""
    whole = crossing(A100, HEALTHY, NODE0, NODE1, ACTIVATION, cut=False)
    cut = crossing(A100, HEALTHY, NODE0, NODE1, ACTIVATION, cut=True)
    assert whole.seconds == pytest.approx(14.6e-3, rel=0.01)
    assert cut.seconds == pytest.approx(3.9e-3, rel=0.03)
    assert crossing(A100, HEALTHY, NODE0, NODE1, ACTIVATION) == cut


def test_inside_a_node_a_whole_tensor_is_faster():
    """Cutting only adds the gather."""
    assert not crossing(A100, HEALTHY, NODE0, NODE0_OTHER, ACTIVATION).cut


def test_unequal_degrees_always_cut():
    """There is no member to send a whole tensor to."""
    for cut in (None, True, False):
        assert crossing(A100, HEALTHY, NODE0, NODE1[:2], ACTIVATION, cut=cut).cut


def test_single_devices_never_cut():
    """One chunk is the tensor."""
    assert not crossing(A100, HEALTHY, (0,), (8,), ACTIVATION, cut=True).cut


def test_more_adapters_carry_more():
    """Eight adapters, four members: a whole tensor takes a quarter of one adapter's time."""
    size = ClusterSize(name="eight", nodes=32, gpus_per_node=8, nics_per_node=8)
    eight = Cluster(
        cluster=size,
        device=A100.device,
        intra_node=A100.intra_node,
        inter_node=Link(gb_per_s=23, latency_us=5),
    )
    one_way = crossing(A100, HEALTHY, NODE0, NODE1, ACTIVATION, cut=False).seconds
    eight_ways = crossing(eight, HEALTHY, NODE0, NODE1, ACTIVATION, cut=False).seconds
    assert one_way / eight_ways == pytest.approx(4, rel=0.01)


def test_a_slow_link_slows_what_crosses_it_and_nothing_else():
    """Both directions of the pair of nodes, not the links inside them."""
    slow = Health(links=(SlowLink(nodes=(0, 1), factor=2.0, delay_s=0.03),))

    def both(health: Health) -> list[float]:
        pairs = ((NODE0, NODE1), (NODE1, NODE0), (NODE0, NODE0_OTHER))
        return [crossing(A100, health, *pair, ACTIVATION, cut=False).seconds for pair in pairs]

    before, after = both(HEALTHY), both(slow)
    assert after[0] == pytest.approx(2 * before[0] + 0.03)
    assert after[1] == pytest.approx(2 * before[1] + 0.03)
    assert after[2] == before[2]


def test_one_replica_has_nothing_to_reduce():
    """And more replicas approach twice the bytes over the link."""
    assert reduce_seconds(A100, 1, 1e9, per_node=1) == 0.0
    assert reduce_seconds(A100, 64, 1e9, per_node=1) == pytest.approx(2e9 / 23e9, rel=0.05)
