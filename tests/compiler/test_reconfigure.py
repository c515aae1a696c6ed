"""Where state comes from: any layers, ranks and degrees before and after."""

from __future__ import annotations

import random
from itertools import permutations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import MESHES, adaptation_findings, layout, random_layout
from plan_cases import chunks_by_rank, lacking

from resihp.compiler.facts import move_bytes
from resihp.compiler.reconfigure import lines_to, reconfiguration
from resihp.compiler.seats import seats
from resihp.compiler.sources import State, require_state
from resihp.errors import NoFeasiblePlan
from resihp.ir.model import Group, GroupName, LayerRange, Mesh, Plan, Reshard
from resihp.ir.reshard import holds, transfers


def group(replica: int, pp: int, ranks: range, *layers: tuple[int, int]) -> Group:
    held = tuple(LayerRange(*each) for each in layers)
    return Group(replica=replica, pp=pp, ranks=tuple(ranks), layers=held)


def is_whole(previous: Plan, lost: frozenset[int]) -> bool:
    """Whether live ranks hold all chunks of all layers between them."""
    held = [layers for rank, layers in chunks_by_rank(previous).items() if rank not in lost]
    return all(
        set(range(previous.mesh.tp)) == set().union(*(layers.get(n, set()) for layers in held))
        for n in range(previous.model.layers)
    )


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(MESHES), st.sampled_from([None, 1, 2, 4]))
def test_any_layout_follows_any_other_as_long_as_the_state_lives(seed, mesh, per_node):
    """The verifier finds nothing; every chunk comes once, from a live holder."""
    rng = random.Random(seed)
    gone = frozenset(rng.sample(range(mesh.world), rng.choice((0, 0, 1))))
    num_layers = rng.randint(2 * mesh.pp + 1, 4 * mesh.pp + 2)
    previous = random_layout(rng, mesh, num_layers, gone)
    lost = gone | frozenset(rng.sample(range(mesh.world), rng.choice((0, 1, 2, 3))))
    lost = lost if mesh.world - len(lost) >= mesh.pp else gone
    state = State(previous, lost)
    if not is_whole(previous, lost):
        with pytest.raises(NoFeasiblePlan, match="no live rank still holds chunk"):
            require_state(state)
        return
    require_state(state)
    new = random_layout(rng, mesh, num_layers, lost)
    node_of = None if per_node is None else (lambda rank: rank // per_node)
    lines = reconfiguration(previous, new.groups, lost, node_of=node_of)
    plan = msgspec.structs.replace(new, reconfigure=lines)
    assert adaptation_findings(plan, previous) == []
    assert lacking(previous, plan) == set()
    assert _are_maximal(previous, lines)


def _are_maximal(previous: Plan, lines: tuple[Reshard, ...]) -> bool:
    """No two lines of the same ends could be one."""
    ends = {(line.source, line.target, line.layers.first) for line in lines}
    return not any((line.source, line.target, line.layers.last + 1) in ends for line in lines)


def test_layers_that_change_hands_come_from_the_own_replica():
    """Position 0 gives layer 2 to position 1, in both replicas; what stays is not named."""
    mesh = Mesh(tp=2, pp=2, dp=2)
    before = [
        group(0, 0, range(2), (0, 2)), group(0, 1, range(2, 4), (3, 5)),
        group(1, 0, range(4, 6), (0, 2)), group(1, 1, range(6, 8), (3, 5)),
    ]  # fmt: skip
    after = [
        msgspec.structs.replace(g, layers=(LayerRange(*((0, 1) if g.pp == 0 else (2, 5))),))
        for g in before
    ]
    lines = reconfiguration(layout(mesh, 6, tuple(before)), after, ())
    assert lines == tuple(
        Reshard(layers=LayerRange(2, 2), source=GroupName(dp, 0), target=GroupName(dp, 1))
        for dp in (0, 1)
    )


def test_lines_run_over_as_many_layers_as_one_source_gives():
    """Two stages of one group that lie side by side are one run."""
    mesh = Mesh(tp=1, pp=2, dp=2)
    stages = ((0, 1), (6, 7)), ((2, 3), (4, 5))
    before = tuple(
        group(dp, pp, range(2 * dp + pp, 2 * dp + pp + 1), *stages[pp])
        for dp in (0, 1)
        for pp in (0, 1)
    )
    after = (*before[:2], group(1, 0, range(2, 3), *stages[0]))
    fresh = layout(mesh, 8, after, frozenset({3}))
    again = reconfiguration(fresh, (*after, group(1, 1, range(3, 4), *stages[1])), ())
    assert again == (
        Reshard(layers=LayerRange(2, 5), source=GroupName(0, 1), target=GroupName(1, 1)),
    )


def test_a_source_on_the_same_node_is_preferred():
    """Replicas 0 and 1 could give; replica 1 shares the node."""
    mesh = Mesh(tp=1, pp=1, dp=4)
    groups = tuple(group(dp, 0, range(dp, dp + 1), (0, 3)) for dp in range(4))
    previous = layout(mesh, 4, groups[:2] + groups[3:], frozenset({2}))
    (near,) = reconfiguration(previous, groups, (), node_of=lambda rank: rank // 2)
    (anyone,) = reconfiguration(previous, groups, ())
    assert (near.source.replica, anyone.source.replica) == (3, 0)


def test_equal_sources_give_equally_much():
    """Three replicas are brought back by three others, each by its own."""
    mesh = Mesh(tp=1, pp=1, dp=6)
    groups = tuple(group(dp, 0, range(dp, dp + 1), (0, 3)) for dp in range(6))
    previous = layout(mesh, 4, groups[:3], frozenset({3, 4, 5}))
    lines = reconfiguration(previous, groups, ())
    assert sorted(line.source.replica for line in lines) == [0, 1, 2]


def test_groups_that_stay_are_not_looked_at():
    """Ten failures in a job of 4096 ranks: only ten groups are asked about."""
    mesh = Mesh(tp=4, pp=8, dp=128)
    groups = tuple(
        group(dp, pp, range((dp * 8 + pp) * 4, (dp * 8 + pp) * 4 + 4), (2 * pp, 2 * pp + 1))
        for dp in range(128)
        for pp in range(8)
    )
    previous = layout(mesh, 16, groups)
    lost = frozenset(range(0, 4000, 400))
    new = [
        g
        if lost.isdisjoint(g.ranks)
        else msgspec.structs.replace(g, ranks=tuple(r for r in g.ranks if r not in lost)[-2:])
        for g in groups
    ]
    asked: list[int] = []

    class Watched(State):
        def held(self, rank: int, layer: int) -> range:
            asked.append(rank)
            return super().held(rank, layer)

    assert len(lines_to(Watched(previous, lost), new)) == 10
    assert len(asked) == 20


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(MESHES))
def test_seats_move_the_least_bytes(seed, mesh):
    """Against all orders of all choices of members."""
    rng = random.Random(seed)
    previous = random_layout(rng, mesh, 2 * mesh.pp + 2)
    state = State(previous, frozenset())
    target = rng.choice(previous.groups)
    candidates = rng.sample(range(mesh.world), min(mesh.world, 5))
    degree = 1 << rng.randint(0, min(mesh.tp, 4).bit_length() - 1)
    layers = rng.choice(previous.groups).layers
    chosen = seats(state, target.name, layers, candidates, degree)
    least = min(
        _moved(previous, target, layers, ranks) for ranks in permutations(candidates, degree)
    )
    assert len(set(chosen)) == degree
    assert set(chosen) <= set(candidates)
    assert _moved(previous, target, layers, chosen) == least


def _moved(
    previous: Plan, place: Group, layers: tuple[LayerRange, ...], ranks: tuple[int, ...]
) -> int:
    """Bytes that `ranks` lack, by the executor's own list of moves."""
    target = msgspec.structs.replace(place, ranks=ranks, layers=layers)
    lines = tuple(
        Reshard(layers=LayerRange(n, n), source=source.name, target=target.name)
        for first, last in layers
        for n in range(first, last + 1)
        for source in previous.groups
        if holds(source, LayerRange(n, n))
    )
    plan = msgspec.structs.replace(previous, groups=(target,), reconfigure=lines)
    return sum(move_bytes(previous.model, move) for move in transfers(previous, plan))


def test_a_slow_candidate_takes_no_seat_that_a_faster_one_can_have():
    """Speed comes before bytes, and among the fast ones bytes decide."""
    mesh = Mesh(tp=2, pp=1, dp=3)
    previous = layout(
        mesh, 2, tuple(group(dp, 0, range(2 * dp, 2 * dp + 2), (0, 1)) for dp in range(2))
    )
    state = State(previous, frozenset({1}))
    speeds = {0: 1.0, 3: 0.5, 4: 1.0, 5: 1.0}
    ranks = seats(
        state, GroupName(0, 0), (LayerRange(0, 1),), [0, 3, 4, 5], 2, speed_of=speeds.__getitem__
    )
    assert ranks == (0, 4)
