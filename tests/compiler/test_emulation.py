"""Emulated plans: the executor's own interpreter takes the time that the simulator says."""

from __future__ import annotations

import random

import pytest
from failure_states import adapted_state, failure_state
from msgspec import structs
from plan_cases import model_of, plan_of
from plan_generator import generate
from plan_mutator import ORDER, mutate
from random_prices import random_lengths, random_pricing
from slow_streams import slow_streams

from resihp.compiler import initial_plan
from resihp.compiler.adaptation import adapt
from resihp.compiler.lane_times import lane_seconds
from resihp.compiler.pricing import Pricing
from resihp.compiler.schedules import SCHEDULES
from resihp.compiler.simulate import simulate
from resihp.errors import Deadlock, NoFeasiblePlan
from resihp.executor.emulation.run import emulate
from resihp.ir.diagnostics import Severity
from resihp.ir.model import Batch, GroupName, Mesh, Op, Plan
from resihp.ir.parser import parse
from resihp.ir.placement import placement_of
from resihp.ir.printer import print_plan
from resihp.ir.verify import verify

_TICK_S = 1e-9
ORDER_CODES = {"RHP412", "RHP501"}
"""Errors of the order alone: messages out of order, and deadlocks."""


def emulated_s(plan: Plan, pricing: Pricing) -> float:
    """Seconds of one iteration in virtual time."""
    (iteration,) = emulate(plan, lane_seconds(plan, pricing))
    assert iteration.num_late == 0
    return iteration.lasts_ns * _TICK_S


def rounding_s(plan: Plan) -> float:
    """Each instruction is rounded to a tick of the clock."""
    return _TICK_S * sum(len(stream.body) for stream in plan.streams)


@pytest.mark.parametrize("part", range(4))
def test_random_plans_take_what_their_streams_say_and_no_longer_than_simulated(part):
    """Any stages, pairs, migrations, unequal TP, slow devices and links, lengths of documents."""
    num_equal = 0
    for seed in range(part * 50, part * 50 + 50):
        rng = random.Random(seed)
        plan = generate(rng)
        pricing = random_pricing(plan, rng)
        lengths = random_lengths(plan, rng) if rng.random() < 0.5 else None
        seconds = lane_seconds(plan, pricing, lengths)
        (iteration,) = emulate(plan, seconds)
        found, slack = iteration.lasts_ns * _TICK_S, rounding_s(plan)
        simulated = simulate(plan, pricing, lengths=lengths).iteration_s
        assert found == pytest.approx(slow_streams(plan, seconds), abs=slack)
        assert found <= simulated + slack
        num_equal += found >= simulated - slack
    assert num_equal, "the bound is never met"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lowered_schedules_take_the_simulated_time(schedule):
    """Exactly, but for reductions of one stage beside the compute of another."""
    for tp, pp, dp, microbatches in ((1, 4, 1, 8), (2, 2, 2, 4), (1, 3, 3, 6), (4, 2, 1, 4)):
        plan = initial_plan(
            model_of(layers=4 * pp),
            Mesh(tp=tp, pp=pp, dp=dp),
            Batch(microbatches=microbatches, tokens=32),
            schedule=schedule,
            memory_bytes=1 << 30,
        )
        pricing = random_pricing(plan, random.Random(pp * 7 + dp))
        found, simulated = emulated_s(plan, pricing), simulate(plan, pricing).iteration_s
        hidden = 0.0
        if len(placement_of(plan).layers) > pp:
            hidden = sum(_reductions(plan, pricing).values())
        assert simulated - hidden - rounding_s(plan) <= found <= simulated + rounding_s(plan)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_that_recompute_take_the_simulated_time(schedule):
    """Their forward is computed again in B: an iteration that takes longer, and as simulated."""
    plain = plan_of(tp=1, pp=4, dp=1, schedule=schedule)
    pricing = random_pricing(plain, random.Random(1))
    for recompute in ((1,), (0, 1, 2, 3)):
        plan = structs.replace(plain, recompute=recompute)
        simulated = simulate(plan, pricing).iteration_s
        assert simulated > simulate(plain, pricing).iteration_s
        assert emulated_s(plan, pricing) == pytest.approx(simulated, abs=rounding_s(plan))


def _reductions(plan: Plan, pricing: Pricing) -> dict[int | None, float]:
    """What the reductions of each stage take."""
    seconds = lane_seconds(plan, pricing)
    group = {stream.pp: stream for stream in plan.streams}
    return {
        instr.stage if instr.stage is not None else -1 - pp: seconds[name][index]
        for pp, stream in group.items()
        for name in seconds
        if name.pp == pp
        for index, instr in enumerate(stream.body)
        if instr.op is Op.REDUCE_GRADS
    }


@pytest.mark.parametrize("seed", range(6))
def test_adapted_plans_take_the_simulated_time(seed):
    """After failures of real jobs, with slow ranks and links: unequal TP and migrated work."""
    for state in (failure_state(f"emulated {seed}"), adapted_state(f"emulated {seed}")):
        try:
            plan = adapt(state).plan
        except NoFeasiblePlan:
            continue
        simulated = simulate(plan, state.pricing).iteration_s
        assert emulated_s(plan, state.pricing) == pytest.approx(simulated, abs=rounding_s(plan))


def test_iterations_take_the_same_time_again_and_again():
    plan = plan_of(tp=2, pp=2, dp=2)
    pricing = random_pricing(plan, random.Random(0))
    iterations = emulate(plan, lane_seconds(plan, pricing), num_iterations=5)
    assert len({iteration.lasts_ns for iteration in iterations}) == 1


@pytest.mark.parametrize("part", range(4))
def test_what_gets_stuck_is_what_the_verifier_calls_a_deadlock(part):
    """Plans with a disturbed order: the accepted ones end, and whichever hangs was refused."""
    num_stuck = 0
    for seed in range(part * 40, part * 40 + 40):
        rng = random.Random(seed)
        plan, _ = mutate(generate(rng), rng, ORDER)
        errors = _errors(plan)
        if errors - ORDER_CODES:
            continue
        seconds = lane_seconds(plan, random_pricing(plan, rng))
        told = _stuck(plan, seconds)
        if told is not None:
            num_stuck += 1
            assert "RHP501" in errors, told
            assert " waits at `" in told
    assert num_stuck, "no plan was stuck"


def _stuck(plan: Plan, seconds: dict[GroupName, list[float]]) -> str | None:
    """What is told where the plan gets stuck."""
    try:
        emulate(plan, seconds)
    except Deadlock as stuck:
        return str(stuck)
    return None


def _errors(plan: Plan) -> set[str]:
    found = verify(parse(print_plan(plan)))
    return {each.code for each in found if each.severity is Severity.ERROR}


DEADLOCK = """\
plan 1
model tiny layers=4 hidden=64 heads=8 kv_heads=8 ffn=96 vocab=272
mesh tp=1 pp=2 dp=1
batch microbatches=2 tokens=32
group dp0.pp0 ranks=0 layers=0..1
group dp0.pp1 ranks=1 layers=2..3

stream dp=0 pp=0 {
  F 0
  send_act 0
  recv_grad 0
  BW 0
  F 1
  send_act 1
  recv_grad 1
  BW 1
  reduce_grads
  step
}

stream dp=0 pp=1 {
  recv_act 0
  recv_act 1
  F 1
  BW 1
  send_grad 1
  F 0
  BW 0
  send_grad 0
  reduce_grads
  step
}
"""


def test_a_deadlock_is_told_in_terms_of_the_plan():
    """Who stands at which instruction and waits for which tensor of whom, around the circle."""
    plan = parse(DEADLOCK).plan
    assert _errors(plan) == ORDER_CODES
    pricing = random_pricing(plan, random.Random(0))
    with pytest.raises(Deadlock) as stuck:
        emulate(plan, lane_seconds(plan, pricing))
    assert str(stuck.value).splitlines() == [
        "deadlock: rank 0 waits for rank 1, which waits for rank 0",
        "  rank 0 of dp0.pp0 waits at `BW 0` (instruction 3) for `recv_grad 0` (instruction 2) "
        "from rank 1 of dp0.pp1",
        "  rank 1 of dp0.pp1 waits at `F 1` (instruction 2) for `recv_act 1` (instruction 1) "
        "from rank 0 of dp0.pp0",
        "  2 of 2 ranks wait for ever",
    ]
