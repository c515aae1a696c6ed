"""Plans that keep micro-batches of an interrupted iteration."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_build import make_plan
from plan_generator import generate

from resihp.ir.kept import kept_by, same_groups, weights_run_at, without
from resihp.ir.model import GroupName, MicroBatch, Plan, Resume
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.verify import verify

seeds = st.integers(0, 10**9).map(random.Random)
BEFORE = make_plan(tp=2, dp=2, microbatches=3)


def codes(plan: Plan, previous: Plan | None = None) -> list[str]:
    return [finding.code for finding in verify(parse(print_plan(plan)), previous=previous)]


def all_of(plan: Plan) -> list[MicroBatch]:
    return [
        MicroBatch(home, number)
        for home in range(plan.mesh.dp)
        for number in range(plan.batch.microbatches)
    ]


def some(rng: random.Random, plan: Plan) -> list[MicroBatch]:
    each = all_of(plan)
    return rng.sample(each, rng.randint(0, len(each)))


@given(seeds)
@settings(max_examples=200, deadline=None)
def test_a_right_plan_is_right_without_any_of_its_micro_batches(rng: random.Random):
    """Whatever its stages, moves, pairs and TP degrees: nothing is missing and nothing hangs."""
    plan = generate(rng)
    keep = some(rng, plan)
    left = without(plan, keep, 7)
    assert codes(left) == []
    assert left.resume == Resume(step=7, keep=tuple(sorted(keep)))
    runs = weights_run_at(plan)
    for stage, found in weights_run_at(left).items():
        assert found == {each: runs[stage][each] for each in all_of(plan) if each not in keep}


@given(seeds)
@settings(max_examples=200, deadline=None)
def test_what_is_kept_is_done_and_what_is_not_kept_is_not(rng: random.Random):
    """A micro-batch too many or too few is found, in whatever replica."""
    plan = generate(rng)
    left = without(plan, some(rng, plan), 7)
    wrong = rng.choice(all_of(plan))
    keep = tuple(sorted(kept_by(left) ^ {wrong}))
    found = set(codes(msgspec.structs.replace(left, resume=Resume(step=7, keep=keep))))
    assert found == ({"RHP307"} if wrong in keep else {"RHP301"})


def following(keep: Sequence[MicroBatch]) -> Plan:
    """BEFORE, resumed."""
    return without(BEFORE, keep, 7)


def test_gradients_are_kept_where_all_groups_stay():
    """All of them, and in the next interruption those of both iterations."""
    keep = all_of(BEFORE)[1:4]
    assert codes(following(keep), BEFORE) == []
    assert codes(following(all_of(BEFORE)), following(keep)) == []


def test_what_another_iteration_kept_is_not_kept_here():
    """Only a plan for the same step hands on what it kept itself."""
    again = following(all_of(BEFORE)[:1])
    assert codes(again, msgspec.structs.replace(again, resume=Resume(step=6, keep=()))) == [
        "RHP812",
        "RHP812",
    ]


def test_a_group_with_other_ranks_has_no_gradients():
    """One rank less, or the same ranks in other seats."""
    groups = tuple(
        msgspec.structs.replace(group, ranks=group.ranks[::-1]) if group.replica else group
        for group in BEFORE.groups
    )
    plan = msgspec.structs.replace(following([MicroBatch(1, 0)]), groups=groups)
    assert same_groups(BEFORE, plan) == {GroupName(0, 0), GroupName(0, 1)}
    assert "RHP812" in codes(plan, BEFORE)
    assert "RHP812" not in codes(
        msgspec.structs.replace(following([MicroBatch(0, 0)]), groups=groups), BEFORE
    )
