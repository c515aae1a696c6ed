"""From plans, prices and health to the planner's problem."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import MESHES, random_groups
from plan_cases import plan_of

from resihp.compiler.adaptation import Profile, Situation, problem_of
from resihp.compiler.adaptation.layouts import Layout, kept_layout
from resihp.compiler.adaptation.problems import TICK_S, in_flight_of
from resihp.compiler.cluster import CLUSTERS, Cluster, ClusterSize, Health, SlowLink
from resihp.compiler.costs import CostModel
from resihp.compiler.models import Model
from resihp.compiler.pricing import Pricing
from resihp.errors import UserError
from resihp.ir.model import Op, Plan

SMALL_NODES = msgspec.structs.replace(
    CLUSTERS["cpu-box"], cluster=ClusterSize(name="boxes", nodes=16, gpus_per_node=4)
)


def situation_of(plan: Plan, cluster: Cluster = SMALL_NODES, **health: object) -> Situation:
    costs = CostModel.of_description(Model(shape=plan.model), cluster, precision="fp32")
    return Situation(plan, Pricing(plan.model, costs, cluster, msgspec.convert(health, Health)))


def test_rows_are_priced_per_group_and_equal_replicas_share_theirs():
    """F, B and W of a stage in nanoseconds; a slow member slows its group alone."""
    plan = plan_of(tp=2, pp=2, dp=3)
    situation = situation_of(plan, speed={5: 0.5})
    layout = kept_layout(situation)
    assert layout is not None
    problem = problem_of(situation, layout)
    assert problem.replicas[0] is problem.replicas[2]
    healthy, slow = problem.replicas[0].chunks[0], problem.replicas[1].chunks[0]
    assert healthy and slow
    group = plan.groups[0]
    seconds = situation.pricing.compute_s(group, group.sole_layers, Op.F, situation.lengths)
    assert healthy.forward == pytest.approx(seconds / TICK_S, abs=1)
    assert slow.backward_weight == pytest.approx(2 * healthy.backward_weight, abs=1)
    assert problem.replicas[1].chunks[1] == problem.replicas[0].chunks[1]


def test_what_a_layout_lacks_is_none():
    """A replica without a group at a stage has neither cost nor memory there."""
    plan = plan_of(tp=1, pp=2, dp=2)
    situation = situation_of(plan, lost=[1])
    assert kept_layout(situation) is None
    groups = tuple(group for group in plan.groups if 1 not in group.ranks)
    problem = problem_of(situation, Layout(groups, (), (1,)))
    assert problem.replicas[0].chunks[1] is None
    assert problem.replicas[0].memory[1] is None
    assert problem.replicas[1].chunks[1] is not None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(MESHES))
def test_a_crossing_is_the_slowest_of_all_pairs_of_replicas(seed, mesh):
    """Any layout, some of its groups missing, and a slow link: each sender, each receiver."""
    rng = random.Random(seed)
    plan = plan_of(tp=mesh.tp, pp=mesh.pp, dp=mesh.dp)
    stages = [group.layers for group in plan.groups[: mesh.pp]]
    groups = random_groups(rng, mesh, stages, range(mesh.world))
    nodes = sorted(rng.sample(range(4), 2))
    situation = situation_of(plan, links=[SlowLink(nodes=(nodes[0], nodes[1]), factor=3.0)])
    problem = problem_of(situation, Layout(groups, (), ()))

    def slowest(stage: int) -> int:
        tokens, crossing = plan.batch.tokens, situation.pricing.crossing
        pairs = [
            (one, other)
            for one in groups
            for other in groups
            if one.replica != other.replica and (one.pp, other.pp) == (stage, stage + 1)
        ]
        times = [
            crossing(way[0], way[1], tokens).seconds for pair in pairs for way in (pair, pair[::-1])
        ]
        return max((max(1, round(each / TICK_S)) for each in times), default=0)

    assert problem.crossing == tuple(slowest(stage) for stage in range(mesh.pp - 1))


def test_the_schedule_sets_the_bound_and_whether_w_is_apart():
    """1F1B fuses B and W and holds p - s in flight, ZB-H1 has p everywhere, GPipe no bound."""
    for name, bound in (("1f1b", (2, 1)), ("zb-h1", (2, 2)), ("gpipe", None)):
        situation = situation_of(plan_of(schedule=name))
        layout = kept_layout(situation)
        assert layout is not None
        assert problem_of(situation, layout).split
        fused = situation.with_profile(Profile(splits_backward=False))
        problem = problem_of(fused, layout)
        assert (problem.in_flight, problem.split) == (bound, name == "zb-h1")
        assert in_flight_of(name, 2) == bound


def test_ranks_that_the_job_does_not_have_are_the_callers_fault():
    """Lost or slow, the sentence names the rank and the valid ones."""
    with pytest.raises(UserError, match=r"slow rank 8: the job's ranks are 0\.\.7"):
        situation_of(plan_of(), speed={8: 0.5})
    with pytest.raises(UserError, match=r"lost rank 9: the job's ranks are 0\.\.7"):
        situation_of(plan_of(), lost=[9])
