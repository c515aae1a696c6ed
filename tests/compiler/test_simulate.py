"""The simulator: the same times as a slow player of the same plan, and what follows from them."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from plan_cases import plan_of
from plan_generator import as_schedule, generate
from random_prices import random_lengths, random_pricing
from slow_player import slow_play

from resihp.compiler import facts_of, lower, ordered, spread_work
from resihp.compiler.cluster import Health
from resihp.compiler.costs import Lengths
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate import Simulation, Simulator, simulate
from resihp.compiler.simulate.report import report_of
from resihp.compiler.simulate.report_text import render_report
from resihp.errors import UserError
from resihp.ir.arrays import arrays_of
from resihp.ir.lanes import lanes_of
from resihp.ir.model import Op, Plan, Stream
from resihp.ir.transfers import transfers_of
from resihp.ir.verify.memory import peaks_of


def assert_agrees(
    simulation: Simulation, plan: Plan, pricing: Pricing, lengths: list[Lengths] | None
) -> None:
    """All times of all groups are those of the slow player."""
    expected, found = slow_play(plan, pricing, lengths), simulation.timeline()
    assert found.starts.keys() == expected.keys()
    for name, times in expected.items():
        assert found.starts[name] == pytest.approx([start for start, _ in times], abs=1e-12)
        assert found.ends[name] == pytest.approx([end for _, end in times], abs=1e-12)


@pytest.mark.parametrize("part", range(3))
def test_times_are_those_of_a_slow_player(part):
    """Over random plans and schedules, clusters, slow devices and links, and lengths."""
    for seed in range(part * 60, part * 60 + 60):
        rng = random.Random(seed)
        plan = generate(rng)
        plan = as_schedule(plan) if rng.random() < 0.3 else plan
        pricing = random_pricing(plan, rng)
        lengths = random_lengths(plan, rng) if rng.random() < 0.5 else None
        assert_agrees(simulate(plan, pricing, lengths=lengths), plan, pricing, lengths)


def test_narrow_and_wide_plans_are_played_alike():
    """One is passed node by node, the other in rounds: both give the times of the slow player."""
    for pp, dp, microbatches in ((2, 1, 40), (6, 9, 6)):
        plan = plan_of(tp=1, pp=pp, dp=dp, microbatches=microbatches)
        pricing = random_pricing(plan, random.Random(0))
        lengths = random_lengths(plan, random.Random(1))
        assert_agrees(simulate(plan, pricing, lengths=lengths), plan, pricing, lengths)


def test_alike_replicas_are_played_once_unless_their_prices_differ():
    plan = plan_of(tp=1, pp=2, dp=4)
    pricing = random_pricing(plan, random.Random(3))
    healthy = Pricing(plan.model, pricing.costs, pricing.cluster, Health())
    slowed = Pricing(plan.model, pricing.costs, pricing.cluster, Health(speed={2: 0.5}))
    assert simulate(plan, healthy).arrays.lanes.num == 2
    assert simulate(plan, slowed).arrays.lanes.num == 4
    differing = [Lengths.of([number + 1]) for number in range(16)]
    assert simulate(plan, healthy, lengths=differing).arrays.lanes.num == 8
    assert simulate(plan, healthy, lengths=differing[:4]).arrays.lanes.num == 2


def test_a_simulator_is_played_at_any_lengths_and_takes_the_arrays_of_the_verifier():
    plan = plan_of(tp=1, pp=2, dp=3)
    pricing = random_pricing(plan, random.Random(3))
    simulator = Simulator(plan, pricing, arrays=arrays_of(plan), apart=True)
    for seed in range(3):
        lengths = random_lengths(plan, random.Random(seed))
        expected = simulate(plan, pricing, lengths=lengths).timeline()
        assert simulator.run(lengths).timeline() == expected
    slowed = Pricing(plan.model, pricing.costs, pricing.cluster, Health(speed={2: 0.5}))
    collapsed = simulate(plan, slowed, arrays=arrays_of(plan))
    assert collapsed.timeline() == simulate(plan, slowed).timeline()


def test_busy_bubble_and_shared_time_make_up_the_iteration():
    plan = plan_of(tp=2, pp=3, dp=2)
    simulation = simulate(plan, random_pricing(plan, random.Random(5)))
    lanes = lanes_of(plan)
    for row in simulation.groups():
        starts, ends = (times[row.group.name] for times in simulation.timeline()[:2])
        seconds = {
            kind: sum(
                end - start
                for start, end, instr in zip(starts, ends, lanes[row.group.name].body, strict=True)
                if instr.op.is_compute == kind
            )
            for kind in (True, False)
        }
        assert row.busy_s == pytest.approx(seconds[True])
        total = row.busy_s + row.bubble_s + seconds[False]
        assert total == pytest.approx(simulation.iteration_s)
        assert row.utilisation == pytest.approx(row.busy_s / simulation.iteration_s)


def test_bytes_of_links_are_those_of_all_transfers():
    """Replicas that were played once count as often as they are; cut tensors cross once."""
    for seed in range(40):
        rng = random.Random(seed)
        plan = generate(rng)
        pricing = random_pricing(plan, rng)
        whole = plan.batch.tokens * pricing.costs.boundary_bytes_per_token
        simulation = simulate(plan, pricing)
        expected: dict[tuple[int, int], float] = {}
        lanes = lanes_of(plan)
        for transfer in transfers_of(lanes, dict.fromkeys(lanes, whole)):
            sender, receiver = lanes[transfer.sender].group, lanes[transfer.receiver].group
            num_pairs = max(sender.tp, receiver.tp)
            for chunk in range(num_pairs):
                pair = (
                    sender.ranks[chunk * sender.tp // num_pairs],
                    receiver.ranks[chunk * receiver.tp // num_pairs],
                )
                expected[pair] = expected.get(pair, 0) + transfer.num_bytes
        assert simulation.bytes_between_ranks() == pytest.approx(expected)
        by_node: dict[tuple[int, int], float] = {}
        for pair, num_bytes in expected.items():
            link = pricing.cluster.node_of(pair[0]), pricing.cluster.node_of(pair[1])
            by_node[link] = by_node.get(link, 0) + num_bytes
        assert simulation.bytes_between_nodes() == pytest.approx(by_node)


def test_a_plan_that_needs_a_lost_rank_is_refused():
    plan = plan_of(tp=2, pp=2, dp=2)
    pricing = random_pricing(plan, random.Random(1))
    gone = Pricing(plan.model, pricing.costs, pricing.cluster, Health(lost=frozenset([5])))
    with pytest.raises(UserError, match=r"rank 5 is lost, and dp1\.pp0"):
        simulate(plan, gone)


def test_a_plan_with_findings_is_refused():
    plan = plan_of(tp=1, pp=2, dp=1)
    streams = list(plan.streams)
    body = tuple(instr for instr in streams[0].body if instr.op is not Op.SEND_ACT)
    streams[0] = msgspec.structs.replace(streams[0], body=body)
    broken = msgspec.structs.replace(plan, streams=tuple(streams))
    with pytest.raises(UserError, match="a tensor does not reach its use"):
        simulate(broken, random_pricing(plan, random.Random(1)))


def test_instruction_times_do_not_overlap_in_a_lane():
    plan = plan_of(tp=1, pp=4, dp=2, microbatches=6)
    simulation = simulate(plan, random_pricing(plan, random.Random(8)))
    same = np.diff(simulation.arrays.lane) == 0
    assert (simulation.start[1:][same] >= simulation.end[:-1][same] - 1e-12).all()


def test_peaks_of_memory_are_those_of_the_verifier():
    for seed in range(60):
        rng = random.Random(seed)
        plan = generate(rng)
        simulation = simulate(plan, random_pricing(plan, rng))
        peaks = {peak.group.name: peak.num_bytes for peak in simulation.peaks()}
        assert peaks == peaks_of(lanes_of(plan), facts_of(plan))


def test_memory_over_time_rises_to_the_peak_at_its_instruction_and_ends_with_the_state():
    plan = plan_of(tp=1, pp=2, dp=2, microbatches=3)
    simulation = simulate(plan, random_pricing(plan, random.Random(2)))
    for peak in simulation.peaks():
        seconds, in_use = simulation.memory_over_time(peak.group.name)
        assert (np.diff(seconds) >= 0).all()
        assert in_use.max() == peak.num_bytes
        assert seconds[int(in_use.argmax())] == peak.start_s
        assert in_use[-1] == facts_of(plan).stages[peak.group.name][0].state_bytes


def test_tokens_a_second_are_those_of_the_lengths():
    plan = plan_of(tp=1, pp=2, dp=2, microbatches=3)
    pricing = random_pricing(plan, random.Random(2))
    lengths = [Lengths.of([number + 1, 2]) for number in range(6)]
    simulation = simulate(plan, pricing, lengths=lengths)
    assert simulation.tokens_per_s * simulation.iteration_s == pytest.approx(21 + 12)
    nominal = simulate(plan, pricing)
    assert nominal.tokens_per_s * nominal.iteration_s == pytest.approx(6 * 32)


def test_groups_without_work_are_played_and_reported():
    """All work runs in one replica: the others have empty streams in the schedule."""
    plan = plan_of(tp=1, pp=2, dp=2)
    pricing = random_pricing(plan, random.Random(1))
    one = msgspec.structs.replace(
        plan, groups=tuple(group for group in plan.groups if group.replica == 0), streams=()
    )
    busy = ordered(one, "1f1b", {0: spread_work([0], 2, 4)[0]})
    idle = tuple(Stream(replicas=(1,), pp=pp, body=()) for pp in range(2))
    schedule = msgspec.structs.replace(busy, groups=plan.groups, streams=(*busy.streams, *idle))
    for each in (schedule, lower(schedule)):
        for contention in (False, True):
            simulation = simulate(each, pricing, contention=contention)
            assert simulation.end.max(initial=0.0) == pytest.approx(simulation.iteration_s)
            assert [row.busy_s == 0 for row in simulation.groups()] == [False, True] * 2
            assert render_report(report_of(simulation))
        assert_agrees(simulate(each, pricing), each, pricing, None)
