"""Groups that every rank derives alone: the same on all members, and all that the work needs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from cases import assert_same_bits
from exchange import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from layouts import SMALL, idle_plan
from odd_model import ODD, logical, shards
from torch import Tensor

from resihp.executor.device.interface import Communicator
from resihp.executor.layouts import holds
from resihp.executor.memberships import memberships, tied_clusters
from resihp.executor.tied import TiedSums
from resihp.ir.expand import expand
from resihp.ir.model import Group, LayerRange, Mesh, Plan

LAST = SMALL.num_hidden_layers - 1
LAYERS = {
    1: [(LayerRange(0, LAST),)],
    2: [(LayerRange(0, 0),), (LayerRange(1, LAST),)],
    3: [(LayerRange(0, 0),), (LayerRange(1, 1),), (LayerRange(2, LAST),)],
    "v": [(LayerRange(0, 0), LayerRange(3, LAST)), (LayerRange(1, 1), LayerRange(2, 2))],
}
Degrees = Mapping[tuple[int, int], int]
"""TP degree by (replica, position); positions that a replica lacks are left out."""


def plan_with(degrees: Degrees, kind: int | str) -> Plan:
    """Ranks are given out in order of replica and position."""
    layers = LAYERS[kind]
    num_replicas = 1 + max(replica for replica, _ in degrees)
    mesh = Mesh(tp=max(degrees.values()), pp=len(layers), dp=num_replicas)
    groups: list[Group] = []
    first = 0
    for (replica, pp), tp in sorted(degrees.items()):
        ranks = tuple(range(first, first + tp))
        groups.append(Group(replica=replica, pp=pp, ranks=ranks, layers=layers[pp]))
        first += tp
    return idle_plan(mesh, groups)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """One to three replicas of any degrees, some of which lack positions."""
    kind = draw(st.sampled_from([1, 2, 3, "v"]))
    places = [(replica, pp) for replica in range(3) for pp in range(len(LAYERS[kind]))]
    tps = st.sampled_from([1, 2, 4])
    degrees = {place: draw(tps) for place in places if draw(st.booleans())}
    for pp in range(len(LAYERS[kind])):
        if not any(position == pp for _, position in degrees):
            degrees[draw(st.integers(0, 2)), pp] = draw(tps)
    return plan_with(degrees, kind)


@given(plans())
def test_all_members_derive_the_same_groups(plan: Plan):
    """Of the same ranks, under a name of its own, once each."""
    found: dict[str, tuple[int, ...]] = {}
    listed: dict[str, list[int]] = {}
    for rank in plan.active_ranks:
        mine = memberships(ODD, plan, rank)
        assert len({each.role for each in mine}) == len(mine)
        for _, name, ranks in mine:
            assert found.setdefault(name, ranks) == ranks
            listed.setdefault(name, []).append(rank)
    for name, ranks in found.items():
        assert sorted(ranks) == listed[name], f"some members of {name} do not know of it"


@given(plans())
def test_groups_can_be_built_by_all_ranks_in_their_own_order(plan: Plan):
    """No rank waits in a group for one that waits in another: the first unbuilt ones agree."""
    left = {rank: [m.name for m in memberships(ODD, plan, rank)] for rank in plan.active_ranks}
    ranks = {m.name: m.ranks for rank in left for m in memberships(ODD, plan, rank)}
    while any(left.values()):
        heads = {names[0] for names in left.values() if names}
        ready = [n for n in heads if all(left[rank][:1] == [n] for rank in ranks[n])]
        assert ready, "everybody waits for somebody"
        for name in ready:
            for rank in ranks[name]:
                left[rank].pop(0)


@given(plans())
def test_the_members_of_a_cluster_hold_the_chunk_of_their_side(plan: Plan):
    """Every rank that holds a tied tensor is in exactly one cluster for each of its chunks."""
    sides: list[set[tuple[int, int]]] = [set(), set()]
    for cluster in tied_clusters(ODD, plan, 0):
        assert cluster.inputs
        assert cluster.outputs
        for side, ranks in zip(sides, (cluster.inputs, cluster.outputs), strict=True):
            for rank in ranks:
                assert (rank, cluster.chunk) not in side
                side.add((rank, cluster.chunk))
    num_chunks = max(c.num_chunks for c in tied_clusters(ODD, plan, 0))
    for side, layer in zip(sides, (0, LAST), strict=True):
        expected = {
            (rank, chunk)
            for group in plan.groups
            if any(first <= layer <= last for first, last in group.layers)
            for index, rank in enumerate(group.ranks)
            for chunk in range(num_chunks)
            if holds(ODD.layout("table"), chunk, num_chunks, group.tp, index)
        }
        assert side == expected


# --- what they are for: tied gradients


def summed(plan: Plan, whole: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """What every rank has after the exchange."""

    def work(rank: int, groups: Mapping[str, Communicator]) -> dict[str, Tensor]:
        program = expand(plan, rank)
        reduced = shards(program, whole)
        TiedSums(ODD, plan, program, groups).add(reduced)
        return reduced

    return run_ranks(ODD, plan, work)


@pytest.mark.parametrize(
    ("degrees", "kind"),
    [
        ({(0, 0): 1}, 1),
        ({(0, 0): 4, (1, 0): 2}, 1),
        ({(0, 0): 1, (0, 1): 1}, 2),
        ({(0, 0): 4, (0, 1): 1}, 2),
        ({(0, 0): 1, (0, 1): 2, (0, 2): 4}, 3),
        ({(0, 0): 2, (0, 1): 4, (1, 0): 4, (1, 1): 1}, 2),
        ({(0, 0): 2, (1, 1): 4}, 2),
        ({(0, 0): 1, (0, 1): 4, (1, 0): 2, (2, 1): 2}, 2),
        ({(0, 0): 2, (0, 1): 1, (1, 1): 2}, "v"),
        ({(0, 0): 2, (0, 1): 1, (1, 0): 4}, "v"),
    ],
    ids=str,
)
def test_both_sides_get_the_sum_of_both(degrees: Degrees, kind: int | str):
    """Over any degrees, with positions that are missing or on one rank; the rest stays as it is."""
    plan, whole = plan_with(degrees, kind), logical(1)
    both = whole["table"] + whole["head"]
    expected = {**whole, "table": both, "head": both}
    for rank, reduced in summed(plan, whole).items():
        assert_same_bits(reduced, shards(expand(plan, rank), expected))


@given(plans())
def test_tied_tensors_stay_equal_in_any_layout(plan: Plan):
    """The same sum everywhere, whoever exchanged with whom."""
    whole = logical(2)
    both = whole["table"] + whole["head"]
    for rank, reduced in summed(plan, whole).items():
        program = expand(plan, rank)
        expected = shards(program, {**whole, "table": both, "head": both})
        assert torch.equal(
            torch.cat([reduced[name].flatten() for name in sorted(reduced)]),
            torch.cat([expected[name].flatten() for name in sorted(expected)]),
        )
