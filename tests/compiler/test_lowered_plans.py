"""Random schedules, lowered: always right, and free of deadlock under what they are made for."""

from __future__ import annotations

import random
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import findings, plan_of
from schedule_cases import random_schedule

from resihp.compiler import SCHEDULES, lower
from resihp.compiler.lower import everywhere
from resihp.ir.diagnostics import Diagnostic
from resihp.ir.model import Group, GroupName, Instr, Op, Plan
from resihp.ir.placement import placement_of

seeds = st.integers(0, 10**9)
TRANSPORTS = ("edge", "pair", "rank", "eager=0")
OTHER_TRANSPORTS = ("pair", "rank", "eager=0", "eager=4KiB")


def under(plan: Plan, transport: str) -> Plan:
    return msgspec.structs.replace(plan, transport=transport)


def all_findings(plan: Plan) -> list[Diagnostic]:
    """Under each transport."""
    return [finding for transport in TRANSPORTS for finding in findings(under(plan, transport))]


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_any_schedule_that_can_run_is_lowered_to_a_right_plan(seed):
    """With the latest receives; the schedule itself is right too."""
    schedule = random_schedule(seed)
    assert findings(schedule) == []
    assert findings(lower(schedule)) == []
    assert findings(lower(schedule, scatter=everywhere)) == []


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_any_choice_of_what_is_cut_is_right(seed):
    """Sender by sender and receiver by receiver, with migrated work and unequal degrees."""
    rng = random.Random(seed)
    cut: dict[tuple[GroupName, GroupName], bool] = {}

    def scatter(sender: Group, receiver: Group) -> bool:
        return cut.setdefault((sender.name, receiver.name), rng.random() < 0.5)

    assert findings(lower(random_schedule(seed), scatter=scatter)) == []


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(OTHER_TRANSPORTS))
def test_a_plan_with_both_ends_listed_together_ends_under_every_transport(seed, transport):
    """Even with one queue per rank, and without any buffer."""
    assert all_findings(lower(under(random_schedule(seed), transport))) == []


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3, 6])
def test_every_schedule_of_the_compiler_is_lowered_for_every_transport(kind, pp, microbatches):
    """No finding, with either placement of receives."""
    from resihp.compiler import home_work, ordered

    plan = plan_of(tp=2, pp=pp, dp=2, microbatches=microbatches, schedule=kind)
    assert findings(plan) == []
    schedule = ordered(plan, kind, home_work(range(2), microbatches))
    assert all_findings(lower(under(schedule, "rank"))) == []


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_no_receive_could_stand_later(seed):
    """Each is needed at once, or comes before one of its channel that is needed at once."""
    plan = lower(random_schedule(seed))
    for name, body in bodies_of(plan).items():
        channels: dict[GroupName, list[tuple[int, int]]] = defaultdict(list)
        for index, instr in enumerate(body):
            if instr.op in (Op.RECV_ACT, Op.RECV_GRAD):
                channels[sender_of(plan, name, instr)].append((index, use_of(body, index)))
        for channel in channels.values():
            for place, (index, _) in enumerate(channel):
                first_use = min(use for _, use in channel[place:])
                assert not any(i.op.is_compute for i in body[index:first_use])


def bodies_of(plan: Plan) -> dict[GroupName, tuple[Instr, ...]]:
    return {GroupName(r, s.pp): s.body for s in plan.streams for r in s.replicas}


def sender_of(plan: Plan, name: GroupName, recv: Instr) -> GroupName:
    placement = placement_of(plan)
    stage = placement.stage_of(name.pp, recv)
    assert stage is not None
    replica = name.replica if recv.peer is None else recv.peer
    return GroupName(replica, placement.pp[stage + (1 if recv.op is Op.RECV_GRAD else -1)])


def use_of(body: tuple[Instr, ...], recv: int) -> int:
    """Index of the step, the first of a pair, that computes with what is received."""
    ops = (Op.F,) if body[recv].op is Op.RECV_ACT else (Op.B, Op.BW)
    use = next(
        index
        for index, instr in enumerate(body)
        if instr.op in ops and name_in(instr) == name_in(body[recv])
    )
    return use - 1 if body[use - 1].paired else use


def name_in(instr: Instr) -> tuple[int | None, int | None, int | None]:
    return instr.stage, instr.home, instr.microbatch
