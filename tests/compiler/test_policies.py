"""The published systems as policies: what they are known to reach, and what stops them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from statistics import pvariance

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import findings, plan_of
from problem_cases import problem, replica
from test_adaptation_problems import situation_of

from resihp.compiler.cluster import CLUSTERS, SlowLink
from resihp.compiler.planner.carriers import carriers_of, even_shares, round_robin
from resihp.compiler.planner.engine import Engine
from resihp.compiler.policies import POLICIES, find_policies, outcomes
from resihp.compiler.policies.whole_groups import best_play
from resihp.compiler.simulate import simulate
from resihp.errors import UserError
from resihp.ir.model import Plan

FAIL_SLOW = ("greyhound", "recycle+greyhound", "oobleck+greyhound")


def of(name: str, plan: Plan, lost: Sequence[int] = (), speed: dict[int, float] | None = None):
    (found,) = outcomes(situation_of(plan, lost=lost, speed=speed or {}), [name])
    return found


@settings(max_examples=8, deadline=None)
@given(st.randoms(use_true_random=False))
def test_what_a_policy_answers_is_verified_and_its_time_is_the_simulator_s(rng):
    """Any state of health: a sound plan, a time alone, or a reason why the job stops."""
    plan = plan_of(
        rng.choice((1, 2)),
        rng.choice((2, 3)),
        rng.choice((2, 3)),
        schedule=rng.choice(("1f1b", "zb-h1")),
    )
    ranks = range(plan.mesh.world)
    lost = rng.sample(ranks, rng.choice((0, 0, 1, 2)))
    speed = {rank: rng.choice((0.3, 0.7)) for rank in rng.sample(ranks, 2) if rank not in lost}
    situation = situation_of(plan, lost=lost, speed=speed)
    for outcome in outcomes(situation, POLICIES):
        assert outcome.note
        if outcome.plan is not None:
            assert findings(outcome.plan, plan) == []
            assert outcome.iteration_s == simulate(outcome.plan, situation.pricing).iteration_s
        if outcome.iteration_s is not None and outcome.plan is None:
            assert outcome.name.startswith("oobleck")


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 8), (4, 8), (4, 32), (8, 16)])
def test_recycle_with_one_peer_runs_at_half_speed_or_a_little_more(num_stages, num_microbatches):
    """Two replicas, one dead stage: 1/2 <= throughput <= (m + p - 1) / 2 m of fault-free 1F1B."""
    m, p = num_microbatches, num_stages
    healthy = Engine(problem([replica(p)] * 2, m, split=False), {}).run().makespan
    rows = [replica(p), replica(p, dead=(p // 2,))]
    lost = problem(rows, m)._replace(in_flight=tuple(range(p, 0, -1)))
    planned = best_play(lost, round_robin(lost, {}))
    assert 1 / 2 <= healthy / planned.makespan <= (m + p - 1) / (2 * m)


def test_recycle_deals_lost_work_out_evenly():
    """Three peers, eight micro-batches of a dead stage: 3, 3 and 2."""
    rows = [replica(2), replica(2, dead=(1,)), replica(2), replica(2)]
    takers = [stages[1] for stages in round_robin(problem(rows, 8), {}).values()]
    assert sorted(map(takers.count, (0, 2, 3))) == [2, 3, 3]


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_greyhound_brings_a_slowdown_of_1_7_down_to_1_1_to_1_3(num_replicas):
    """As its paper reports for 2, 4 and 8 replicas."""
    healthy = problem([replica(4)] * num_replicas, 16, split=False)
    slow = problem(
        [*[replica(4)] * (num_replicas - 1), replica(4, slow={1: 1.57})], 16, split=False
    )
    fault_free = Engine(healthy, {}).run().makespan
    assert Engine(slow, {}).run().makespan / fault_free == pytest.approx(1.7, abs=0.05)
    planned = best_play(slow, round_robin(slow, carriers_of(slow)))
    assert 1.05 <= planned.makespan / fault_free <= 1.35


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 8))
def test_shares_vary_as_little_as_any(ticks, more):
    """All ways to share, tried one after the other."""
    count = len(ticks) + more

    def spread(shares) -> float:
        return pvariance([share * each for share, each in zip(shares, ticks, strict=True)])

    ways = (w for w in product(range(1, count + 1), repeat=len(ticks)) if sum(w) == count)
    found = even_shares(ticks, count)
    assert sum(found) == count
    assert min(found) >= 1
    assert spread(found) <= min(map(spread, ways)) * (1 + 1e-9)


def test_shares_of_many_replicas_vary_little():
    """A thousand different paces: no load is further from the mean than half of the longest."""
    ticks = [1000 + index for index in range(1024)]
    found = even_shares(ticks, 16 * len(ticks))
    assert sum(found) == 16 * len(ticks)
    loads = [share * each for share, each in zip(found, ticks, strict=True)]
    mean = sum(loads) / len(loads)
    assert max(abs(load - mean) for load in loads) <= 0.6 * max(ticks)


def test_adaptra_hides_a_slow_link_by_warming_up_more():
    """A delay of several forwards on one link costs it much less than doing nothing."""
    plan = plan_of(tp=1, pp=4, dp=1, microbatches=24, schedule="zb-h1")
    base = situation_of(plan)
    forward = base.pricing.stage(plan.groups[0].sole_layers, 1).forward.seconds(base.lengths)
    link = SlowLink(nodes=(0, 1), delay_s=4 * forward)
    cluster = CLUSTERS["cpu-box"]
    sizes = {"nodes": 4, "gpus_per_node": 2}
    cluster = msgspec.structs.replace(
        cluster, cluster=msgspec.structs.replace(cluster.cluster, **sizes)
    )
    found = outcomes(situation_of(plan, cluster, links=(link,)), ["none", "adaptra"])
    none_s, adaptra_s = (each.iteration_s or 0.0 for each in found)
    assert adaptra_s < 0.85 * none_s


def test_oobleck_goes_on_with_a_shorter_pipeline():
    """Three of four groups are left of one replica: three stages, and fewer micro-batches."""
    plan = plan_of(tp=1, pp=4, dp=2, microbatches=8)
    found = of("oobleck", plan, lost=[1])
    healthy_s = of("none", plan).iteration_s
    assert found.plan is None
    assert found.note.startswith("pipelines of stages x micro-batches: 3x")
    shares = [each.split("x") for each in found.note.split(": ")[1].split()]
    assert [int(depth) for depth, _ in shares] == [3, 4]
    assert sum(int(share) for _, share in shares) == 16
    assert int(shares[0][1]) < int(shares[1][1])
    assert healthy_s is not None and found.iteration_s is not None
    assert 1.0 < found.iteration_s / healthy_s < 1.6


@pytest.mark.parametrize("name", ["none", "greyhound", "adaptra"])
def test_policies_for_slow_devices_stop_when_one_is_lost(name):
    """They have no answer, and say so."""
    found = of(name, plan_of(), lost=[1])
    assert found.iteration_s is None
    assert "rank 1 is lost" in found.note


@pytest.mark.parametrize("name", ["recycle", "oobleck", "recycle+greyhound", "oobleck+greyhound"])
def test_baselines_stop_when_a_stage_has_lost_a_rank_in_every_replica(name):
    """They discard whole TP groups; ours goes on with what is left of them."""
    plan = plan_of(tp=2, pp=2, dp=2)
    lost = [0, 4]
    assert of(name, plan, lost=lost).iteration_s is None
    ours = of("resihp", plan, lost=[0, 5])
    assert ours.iteration_s is not None


@pytest.mark.parametrize("name", FAIL_SLOW)
def test_policies_that_know_speed_help_a_slow_replica(name):
    """Half the speed of one device."""
    plan = plan_of(tp=1, pp=2, dp=2, microbatches=12, schedule="1f1b")
    slow = {0: 0.5}
    found, none = of(name, plan, speed=slow), of("none", plan, speed=slow)
    assert found.iteration_s is not None and none.iteration_s is not None
    assert found.iteration_s < 0.9 * none.iteration_s


def test_policies_are_found_by_name():
    """All at once, or some; a name that is wrong gets the nearest."""
    assert find_policies("all") == list(POLICIES)
    assert find_policies("none, recycle,none") == ["none", "recycle"]
    with pytest.raises(UserError, match="did you mean oobleck"):
        find_policies("oblek")


def test_a_severer_slowdown_never_helps():
    """Ours, from healthy down to a tenth."""
    plan = plan_of(tp=1, pp=2, dp=2, microbatches=6)
    times = [of("resihp", plan, speed={1: p}).iteration_s or 0.0 for p in (0.9, 0.5, 0.1)]
    assert all(one <= other for one, other in pairwise(times))


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs", "zbv"])
def test_a_plan_that_a_policy_does_not_know_goes_on_as_it_is(schedule):
    """Several stages per position: as without a policy, until a rank is lost."""
    plan = plan_of(schedule=schedule)
    for name in ("greyhound", "adaptra", *FAIL_SLOW, "resihp-literal"):
        slow = of(name, plan, speed={1: 0.5})
        assert slow.iteration_s == of("none", plan, speed={1: 0.5}).iteration_s, name
        assert "one stage per position" in slow.note
        assert of(name, plan, lost=[1]).iteration_s is None
