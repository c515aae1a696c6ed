"""Bytes and seconds of a reconfiguration by device and node."""

from __future__ import annotations

import msgspec
import pytest
from layout_cases import layout
from plan_cases import plan_of

from resihp.compiler.adapt import adapt
from resihp.compiler.adaptation import WHOLE_MICROBATCHES
from resihp.compiler.cluster import CLUSTERS, Cluster, ClusterSize, Health, Link, SlowLink
from resihp.compiler.costs import CostModel
from resihp.compiler.facts import move_bytes
from resihp.compiler.models import Model
from resihp.compiler.pricing import Pricing
from resihp.compiler.reconfigure import reconfiguration
from resihp.compiler.state_traffic import state_traffic
from resihp.ir.model import Group, LayerRange, Mesh, Plan
from resihp.ir.reshard import transfers

PAIRS = msgspec.structs.replace(
    CLUSTERS["cpu-box"],
    cluster=ClusterSize(name="pairs", nodes=16, gpus_per_node=2, nics_per_node=1),
    intra_node=Link(gb_per_s=10, latency_us=1),
    inter_node=Link(gb_per_s=1, latency_us=1),
)


def pricing_of(plan: Plan, cluster: Cluster = PAIRS, **health) -> Pricing:
    costs = CostModel.of_description(Model(shape=plan.model), cluster, precision="fp32")
    return Pricing(plan.model, costs, cluster, Health(**health))


def grown(mesh: Mesh, num_before: int, node_of=None) -> tuple[Plan, Plan]:
    """Replicas of one rank each: the first ones hold the model, the others join."""
    groups = tuple(
        Group(replica=dp, pp=0, ranks=(dp,), layers=(LayerRange(0, 7),)) for dp in range(mesh.dp)
    )
    before = layout(mesh, 8, groups[:num_before])
    lines = reconfiguration(before, groups, (), node_of=node_of)
    return before, msgspec.structs.replace(layout(mesh, 8, groups), reconfigure=lines)


def test_the_bytes_are_those_of_the_executors_moves():
    """By pair of ranks and, where they leave a node, by pair of nodes."""
    healthy = plan_of(tp=2, pp=2, dp=2)
    plan = adapt(healthy, lost=[5], step=1, profile=WHOLE_MICROBATCHES).plan
    traffic = state_traffic(healthy, plan, pricing_of(plan))
    moves = transfers(healthy, plan)
    assert traffic.num_bytes == sum(move_bytes(plan.model, move) for move in moves)
    assert set(traffic.by_ranks) == {(move.source, move.target) for move in moves} == {(1, 4)}
    assert traffic.by_nodes == {(0, 2): traffic.num_bytes}
    assert traffic.read_bytes == 0


def test_the_network_bounds_what_leaves_a_node():
    """All state over one adapter of 1 GB/s, and a message's latency each."""
    healthy = plan_of(tp=2, pp=2, dp=2)
    plan = adapt(healthy, lost=[5], step=1, profile=WHOLE_MICROBATCHES).plan
    traffic = state_traffic(healthy, plan, pricing_of(plan))
    num_messages = len(transfers(healthy, plan))
    assert traffic.seconds == pytest.approx(traffic.num_bytes / 1e9 + num_messages * 1e-6)


def test_a_slow_link_is_as_slow_as_it_is():
    """Three times the time of the healthy one, and its delay."""
    healthy = plan_of(tp=2, pp=2, dp=2)
    plan = adapt(healthy, lost=[5], step=1, profile=WHOLE_MICROBATCHES).plan
    slow = SlowLink(nodes=(2, 0), factor=3.0, delay_s=0.5)
    seconds = state_traffic(healthy, plan, pricing_of(plan, links=(slow,))).seconds
    num_bytes = state_traffic(healthy, plan, pricing_of(plan)).num_bytes
    assert seconds == pytest.approx(0.5 + 3 * (1e-6 + num_bytes / 1e9))


def test_sources_on_the_same_node_save_the_network():
    """Replicas 1, 3, 5, 7 join beside 0, 2, 4, 6 of their nodes: ten times as fast at least."""
    mesh = Mesh(tp=1, pp=1, dp=8)
    groups = [Group(replica=dp, pp=0, ranks=(dp,), layers=(LayerRange(0, 7),)) for dp in range(8)]
    before = layout(mesh, 8, tuple(groups[::2]))
    whole = layout(mesh, 8, tuple(groups))
    near = msgspec.structs.replace(
        whole, reconfigure=reconfiguration(before, groups, (), node_of=PAIRS.node_of)
    )
    traffic = state_traffic(before, near, pricing_of(near))
    assert traffic.by_nodes == {}
    assert set(traffic.by_ranks) == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_equal_sources_share_the_load():
    """Six that join take two replicas' time to send three each, not one's to send six."""
    before, plan = grown(Mesh(tp=1, pp=1, dp=8), num_before=2)
    traffic = state_traffic(before, plan, pricing_of(plan))
    sent = {rank: sum(b for (s, _), b in traffic.by_ranks.items() if s == rank) for rank in (0, 1)}
    assert sent[0] == sent[1] == traffic.num_bytes // 2


def test_nothing_moves_in_no_time():
    """A plan that keeps all groups."""
    healthy = plan_of()
    assert state_traffic(healthy, healthy, pricing_of(healthy)).seconds == 0.0
