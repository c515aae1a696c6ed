"""What is kept of an interrupted iteration, held against trying every subset."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import chain, combinations

import msgspec
import pytest
from coordinator_cases import Desk, exited, job_of, record_of
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.compiler import initial_plan
from resihp.config.schema import DeviceKind
from resihp.ir.kept import kept_by, weights_run_at, without
from resihp.ir.model import Batch, Mesh, MicroBatch, ModelShape, Plan
from resihp.ir.parser import parse
from resihp.ir.verify import has_errors, verify
from resihp.monitor.keeping import choose_kept
from resihp.monitor.planner import Planner
from resihp.wire.messages import Deploy, HeldSums, Settled

SHAPE = ModelShape(name="tiny", layers=4, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=128)
STEP = 5


def plan_of(tp: int, pp: int, dp: int, microbatches: int, schedule: str = "1f1b") -> Plan:
    return initial_plan(
        SHAPE,
        Mesh(tp=tp, pp=pp, dp=dp),
        Batch(microbatches=microbatches, tokens=16),
        schedule=schedule,
        memory_bytes=None,
    )


def settled(held: Mapping[int, Iterable[frozenset[int]]], step: int = STEP) -> Settled:
    return Settled(
        generation=2,
        version=step,
        voted=step,
        updates=step,
        record=None,
        layouts=(1,),
        noticed_s=0.0,
        held_step=step,
        held_layout=1,
        held=tuple(
            HeldSums(stage=stage, sets=tuple(tuple(sorted(each)) for each in sets))
            for stage, sets in held.items()
        ),
    )


def without_group(plan: Plan, rng: random.Random) -> tuple[Plan, frozenset[int]]:
    """The plan without some of its groups, and the ranks that are left."""
    gone = rng.sample(plan.groups, rng.randint(0, 2))
    groups = tuple(group for group in plan.groups if group not in gone)
    left = frozenset(rank for group in groups for rank in group.ranks)
    return msgspec.structs.replace(plan, groups=groups), left


def parted(rng: random.Random, numbers: list[int]) -> list[frozenset[int]]:
    """Some of `numbers` in sets."""
    some = [number for number in numbers if rng.random() < 0.8]
    rng.shuffle(some)
    sets: list[frozenset[int]] = []
    while some:
        size = rng.randint(1, 3)
        sets.append(frozenset(some[:size]))
        some = some[size:]
    return sets


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_the_choice_is_the_largest_that_nothing_speaks_against(seed: int):
    """Of all subsets: complete on all members at every stage, and no sum torn apart."""
    rng = random.Random(seed)
    ran = plan_of(rng.choice((1, 2)), rng.choice((1, 2)), 2, rng.choice((2, 3)))
    plan, left = without_group(ran, rng)
    runs = weights_run_at(ran)
    size = ran.batch.microbatches
    states: dict[int, dict[int, list[frozenset[int]]]] = {}
    for stage, of_stage in runs.items():
        for group in ran.groups:
            numbers = [
                home * size + number
                for (home, number), replica in of_stage.items()
                if replica == group.replica and group.pp == stage
            ]
            for rank in group.ranks if group.pp == stage else ():
                states.setdefault(rank, {})[stage] = parted(rng, numbers)

    def stands(keep: frozenset[int]) -> bool:
        for stage, of_stage in runs.items():
            for number in keep:
                replica = of_stage[MicroBatch(*divmod(number, size))]
                group = ran.group(replica, stage)
                assert group is not None
                if not left.issuperset(group.ranks):
                    return False
                for rank in group.ranks:
                    sets = [each for each in states[rank][stage] if number in each]
                    if not sets or not sets[0] <= keep:
                        return False
        return True

    total = range(2 * size)
    subsets = map(
        frozenset, chain.from_iterable(combinations(total, n) for n in (*total, 2 * size))
    )
    best = max(filter(stands, subsets), key=len)
    reports = {rank: settled(held) for rank, held in states.items() if rank in left}
    choice = choose_kept(ran, plan, STEP, reports)
    assert {home * size + number for home, number in choice.micro_batches} == best
    told = [(sums.stage, number) for sums in choice.sums for number in sums.microbatches]
    assert sorted(told) == sorted((stage, number) for stage in runs for number in best)


@pytest.mark.parametrize(
    "report",
    [
        settled({0: [frozenset({0})]}, STEP - 1),
        settled({0: [frozenset({0}), frozenset({0, 1})]}),
        settled({0: [frozenset({0, 99})]}),
        settled({7: [frozenset({0})]}),
    ],
    ids=["another step", "twice", "no such micro-batch", "no such stage"],
)
def test_a_report_that_makes_no_sense_keeps_nothing(report: Settled):
    """Of another step, with a micro-batch twice, with one or a stage that does not exist."""
    plan = plan_of(1, 1, 2, 2)
    assert choose_kept(plan, plan, STEP, {0: report}).micro_batches == ()


JOB = job_of(tp=2, pp=2, dp=2)


def all_done_by(plan: Plan, replica: int) -> dict[int, Settled]:
    """The ranks of a replica have everything, in one sum for each stage."""
    size = plan.batch.microbatches
    done = frozenset(range(replica * size, (replica + 1) * size))
    return {
        rank: settled({group.pp: [done]})
        for group in plan.groups
        if group.replica == replica
        for rank in group.ranks
    }


def test_the_interrupted_iteration_runs_without_what_is_kept_then_the_steady_plan():
    """[T17] Both are verified, in the same layout; the steady one runs everything."""
    planner = Planner(JOB)
    healthy = planner.initial()
    plan = planner.after_loss(healthy, [5], STEP, settled=all_done_by(healthy.plan, 0), step_s=9.0)
    assert kept_by(plan.plan) == {MicroBatch(0, 0), MicroBatch(0, 1)}
    steady = plan.lasting
    assert plan.at(STEP) is plan
    assert plan.at(STEP + 1) is steady
    assert steady.plan.groups == plan.plan.groups
    assert (steady.plan.resume, steady.plan.reconfigure) == (None, ())
    assert not has_errors(verify(parse(plan.text), previous=healthy.plan))
    assert not has_errors(verify(parse(steady.text), previous=plan.plan))
    runs = weights_run_at(steady.plan)
    assert all(len(of_stage) == 4 for of_stage in runs.values())
    again = planner.after_loss(plan, [5, 1], STEP + 1)
    assert len(weights_run_at(again.plan)[0]) == 4, "the next plan is made from the steady one"


@pytest.mark.parametrize(("kind", "is_shared"), [("cpu", True), ("cuda", False)])
def test_what_is_left_is_shared_out_save_on_gpus(kind: DeviceKind, is_shared: bool):
    """The replica whose micro-batches are kept runs some of the other's. On a GPU all are run by
    those of the steady plan, so no pair of ranks needs a stream that has none."""
    device = msgspec.structs.replace(JOB.device, kind=kind)
    planner = Planner(msgspec.structs.replace(JOB, device=device))
    healthy = planner.initial()
    plan = planner.after_loss(healthy, [5], STEP, settled=all_done_by(healthy.plan, 0), step_s=9.0)
    own = without(plan.lasting.plan, kept_by(plan.plan), STEP)
    assert (weights_run_at(plan.plan) != weights_run_at(own)) == is_shared


def test_a_short_iteration_is_not_worth_a_partition_that_waits():
    """The layers move at once, and all is redone."""
    planner = Planner(job_of(tp=1, pp=2, dp=2))
    healthy = planner.initial()
    held = all_done_by(healthy.plan, 0)
    short = planner.after_loss(healthy, [3], STEP, settled=held, step_s=0.1)
    long = planner.after_loss(healthy, [3], STEP, settled=held, step_s=60.0)
    moves = short.plan.groups[0].layers != healthy.plan.groups[0].layers
    assert bool(short.kept) != moves
    assert long.kept
    assert long.waits_for_boundary == moves


@pytest.mark.parametrize("layout", [1, 0])
def test_only_sums_of_the_layout_that_all_go_on_from_are_kept(layout: int):
    """[T17] A rank that changes its layout just now has sums of the one before: other shards."""
    desk = Desk(job_of(tp=2, pp=2, dp=2, steps=9)).run()
    for step in range(STEP):
        desk.step(step)
    plan = parse(desk.last_deploy().plan).plan
    reports = all_done_by(plan, 0)
    desk.say(5, exited())
    for rank in desk.alive:
        report = msgspec.structs.replace(
            reports.get(rank, settled({})), held_layout=layout, record=record_of(STEP - 1)
        )
        desk.say(rank, report)
    _, deploy = desk.sent(Deploy)[-1]
    assert deploy.generation == 2
    assert bool(deploy.kept) == (layout == 1)
