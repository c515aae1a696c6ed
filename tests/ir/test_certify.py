"""The quick proof says yes exactly where the verifier finds nothing."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import numpy as np
import pytest
from placed import placed
from plan_build import make_plan
from plan_generator import EXECUTABLE, LARGE, as_schedule, generate
from plan_mutator import mutate

from resihp.ir import arrays
from resihp.ir.arrays import arrays_of
from resihp.ir.facts import Facts, StageFacts
from resihp.ir.lanes import alike, lanes_of
from resihp.ir.model import GroupName, Instr, Level, Op, Plan
from resihp.ir.verify import verify
from resihp.ir.verify.fast import certify, progress
from resihp.ir.verify.memory import peaks_of

OURS = ("RHP102", "RHP104", "RHP105", "RHP109", "RHP110", "RHP3", "RHP4", "RHP5", "RHP6", "RHP7")
"""What a proof covers; of RHP102 what instructions say."""


def is_proved(plan: Plan, facts: Facts | None = None) -> bool:
    return certify(arrays_of(plan), lambda: facts)


def findings(plan: Plan, facts: Facts | None = None) -> list[str]:
    """Codes that the verifier proper reports."""
    return [finding.code for finding in verify(placed(plan), facts=facts, quick_proof=False)]


def with_body(plan: Plan, at: int, body: tuple[Instr, ...]) -> Plan:
    """The plan with another stream."""
    streams = list(plan.streams)
    streams[at] = msgspec.structs.replace(streams[at], body=body)
    return msgspec.structs.replace(plan, streams=tuple(streams))


def random_facts(plan: Plan, rng: random.Random) -> Facts:
    def sizes() -> StageFacts:
        activation, released = sorted(rng.sample(range(50), 2), reverse=True)
        return StageFacts(
            state_bytes=rng.randrange(50),
            activation_bytes=activation,
            released_by_b_bytes=released,
            weight_input_grad_bytes=rng.randrange(20),
            boundary_bytes=4 * rng.randrange(10),
        )

    return Facts(stages={g.name: tuple(sizes() for _ in g.layers) for g in plan.groups})


@pytest.mark.parametrize("part", range(4))
def test_a_proof_is_had_exactly_where_nothing_is_found(part):
    """Over random plans and schedules of the whole language, and mutants of both."""
    seen: Counter[bool] = Counter()
    for seed in range(part * 100, part * 100 + 100):
        rng = random.Random(seed)
        plan = generate(rng, rng.choice((LARGE, EXECUTABLE)))
        if rng.random() < 0.25:
            plan = as_schedule(plan)
        for mutant in (plan, *(mutate(plan, rng)[0] for _ in range(6))):
            found = findings(mutant)
            assert all(code.startswith(OURS) for code in found), found
            assert is_proved(mutant) == (not found), (seed, found)
            seen[not found] += 1
    assert min(seen.values()) > 100


def test_memory_is_proved_up_to_the_peak_and_not_below():
    """The peak is that of the verifier, with handovers, chunks, pairs and posted sends."""
    for seed in range(150):
        rng = random.Random(seed)
        plan = generate(rng)
        if rng.random() < 0.2:
            plan = as_schedule(plan)
        facts, lanes = random_facts(plan, rng), lanes_of(plan, alike(plan))
        peak = max(peaks_of(lanes, facts).values())
        for capacity in (peak, peak - 1, peak + 10**6):
            limited = msgspec.structs.replace(plan, memory_bytes=capacity)
            assert is_proved(limited, facts) == (capacity >= peak), seed


def test_a_proof_changes_nothing_but_time():
    """Findings of the layout, and of plans without a proof, are as without it."""
    for seed in range(40):
        rng = random.Random(seed)
        plan = generate(rng)
        facts = random_facts(plan, rng)
        mutant = mutate(plan, rng)[0]
        fewer_layers = msgspec.structs.replace(plan.model, layers=plan.model.layers - 1)
        for one in (
            msgspec.structs.replace(plan, memory_bytes=200),
            msgspec.structs.replace(mutant, memory_bytes=200),
            msgspec.structs.replace(mutant, model=fewer_layers),
        ):
            parsed = placed(one)
            assert verify(parsed, facts=facts) == verify(parsed, facts=facts, quick_proof=False)


def test_another_plan_has_other_arrays():
    """Those of the plan that was read are not kept for a changed one."""
    parsed = placed(make_plan(pp=2))
    assert parsed.arrays is parsed.arrays
    changed = msgspec.structs.replace(parsed, plan=make_plan(pp=2, microbatches=5))
    assert changed.arrays is not None and parsed.arrays is not None
    assert changed.arrays.lanes.num_instrs > parsed.arrays.lanes.num_instrs


def test_wide_and_narrow_plans_are_walked_alike(monkeypatch):
    """Rounds of all lanes and one lane at a time come to the same verdict."""
    verdicts: list[list[bool]] = []
    for nodes_per_round in (0.01, 1, 1 << 30):
        monkeypatch.setattr(progress, "_NODES_PER_ROUND", nodes_per_round)
        verdicts.append([])
        for seed in range(150):
            rng = random.Random(seed)
            among = ("drift", "disorder", "swap_reduces", "near")
            verdicts[-1].append(is_proved(mutate(generate(rng), rng, among)[0]))
    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert 20 < sum(verdicts[0]) < 130


def test_reductions_in_other_orders_can_be_a_deadlock():
    """Two replicas reduce their two stages in opposite orders."""
    for seed in range(2000):
        rng = random.Random(seed)
        plan = generate(rng, EXECUTABLE)
        mutant, names = mutate(plan, rng, ("swap_reduces",))
        if names and findings(mutant) == ["RHP501"]:
            assert not is_proved(mutant)
            return
    pytest.fail("no such plan among many")


def test_addresses_far_apart_are_sorted(monkeypatch):
    """Distinct instructions are the same whichever way they are found."""
    plan = make_plan(pp=4, dp=2)
    near = arrays_of(plan)
    monkeypatch.setattr(arrays, "_LARGEST_SPREAD", 0)
    far = arrays_of(plan)
    assert near is not None and far is not None
    for column, other in zip(near.table, far.table, strict=True):
        assert np.array_equal(column[near.row], other[far.row])
    assert certify(far, lambda: None)


def test_equal_instructions_need_not_be_the_same_object():
    """A plan made by hand is proved as one that was read."""
    plan = make_plan(pp=2, dp=2)
    for at, stream in enumerate(plan.streams):
        plan = with_body(plan, at, tuple(msgspec.structs.replace(one) for one in stream.body))
    assert is_proved(plan)


def test_replicas_that_do_the_same_are_looked_at_once():
    """As the verifier groups them."""
    for seed in range(200):
        plan = generate(random.Random(seed))
        found = arrays_of(plan)
        assert found is not None
        assert set(found.lanes.replica.tolist()) == set(alike(plan))


@pytest.mark.parametrize(
    "number",
    [
        Instr(Op.F, 1 << 70),
        Instr(Op.F, -1),
        Instr(Op.F, 0, -1),
        Instr(Op.F, 0, None, -1),
        Instr(Op.F, 10**9),
        Instr(Op.F, 0, 10**9),
        Instr(Op.F, 0, None, 10**9),
        Instr(Op.SEND_ACT, 0, None, None, 10**9),
        Instr(Op.F, None),
        Instr(Op.STEP, 0),
        Instr(Op.STEP, stage=0),
        Instr(Op.F, 0, peer=0),
        Instr(Op.SEND_ACT, 0, paired=True),
    ],
)
def test_a_number_that_cannot_be_is_no_proof(number):
    """Nothing is indexed or allocated by it."""
    plan = make_plan(pp=2)
    assert not is_proved(with_body(plan, 0, (number, *plan.streams[0].body)))


def test_a_huge_batch_takes_no_memory():
    """What is not computed has no place in a table."""
    plan = make_plan(pp=2)
    batch = msgspec.structs.replace(plan.batch, microbatches=10**9)
    assert not is_proved(msgspec.structs.replace(plan, batch=batch))


def test_sizes_beyond_the_integers_of_the_machine_are_no_proof():
    """They might wrap around."""
    plan = make_plan(pp=2, memory_bytes=1 << 62)
    for large, proved in ((1 << 40, True), (1 << 61, False), (1 << 80, False)):
        sizes = StageFacts(
            state_bytes=1,
            activation_bytes=large,
            released_by_b_bytes=1,
            weight_input_grad_bytes=1,
            boundary_bytes=1,
        )
        facts = Facts(stages={group.name: (sizes,) for group in plan.groups})
        assert is_proved(plan, facts) == proved


def test_an_empty_plan_is_no_proof():
    """There is nothing to look at."""
    plan = make_plan(pp=1)
    assert not is_proved(msgspec.structs.replace(plan, streams=()))
    assert not is_proved(with_body(plan, 0, ()))


def test_lost_replicas_and_unequal_degrees_are_proved():
    """The plans that recoveries make."""
    degrees = {GroupName(0, 1): 1, GroupName(2, 0): 1}
    plan = make_plan(pp=3, dp=3, tp=2, gone={1: 2}, degrees=degrees, split=True)
    assert is_proved(plan)
    assert not findings(plan)
    assert plan.level is Level.PLAN
