"""Who hangs is a matter of who waits for whom, never of silence or time alone."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from coordinator_cases import job_of
from hypothesis import given
from hypothesis import strategies as st

from resihp.ir.expand import expand
from resihp.ir.model import Op, Plan
from resihp.monitor.hangs import Suspect, suspect
from resihp.monitor.planner import Planner
from resihp.wire.messages import At, Pause

LONG = 60.0
PAIR = Planner(job_of(1, 2, 1)).initial().plan
"""Two stages; rank 1 computes what rank 0 sends."""
QUAD = Planner(job_of(2, 2, 1)).initial().plan
"""The same with TP 2."""


def first(plan: Plan, rank: int, op: Op) -> int:
    return next(i for i, instr in enumerate(expand(plan, rank).instrs) if instr.op is op)


def runs(**fields: object) -> At:
    at = At(generation=1, runs=True, doing="runs", step=3, since_s=LONG)
    return msgspec.structs.replace(at, **fields)


def computes(plan: Plan, rank: int, op: Op = Op.F, **fields: object) -> At:
    return runs(compute=first(plan, rank, op), **fields)


def waits(plan: Plan, rank: int, op: Op = Op.F, receive: Op = Op.RECV_ACT) -> At:
    index = first(plan, rank, receive)
    return runs(compute=first(plan, rank, op), compute_waits=True, receives=(index,))


def judge(plan: Plan, at: Mapping[int, At], *silent: int, least_s: float = 10.0) -> Suspect | None:
    return suspect(plan, at, silent, least_s)


def test_the_rank_that_computes_and_that_all_others_wait_for_is_the_suspect():
    found = judge(PAIR, {0: computes(PAIR, 0), 1: waits(PAIR, 1)})
    assert found is not None
    assert found.rank == 0
    assert found.reason == "it computes `F 0` for 60.0 s, and rank 1 waits for it"


def test_one_that_does_not_answer_is_the_suspect_if_all_others_wait_for_it():
    """[T3] Its supervisor beats, so it is alive; the interpreter's lock may be held."""
    found = judge(PAIR, {1: waits(PAIR, 1)}, 0)
    assert found is not None
    assert found.rank == 0
    assert "does not answer" in found.reason


def test_nobody_is_suspected_for_silence_alone():
    """The others do not wait for it."""
    assert judge(PAIR, {0: computes(PAIR, 0)}, 1) is None
    assert judge(PAIR, {}, 0, 1) is None


def test_two_that_wait_for_nobody_are_a_tie():
    """[T3] Both compute: one of them may be to blame, or none."""
    assert judge(PAIR, {0: computes(PAIR, 0), 1: computes(PAIR, 1)}) is None


def test_a_circle_is_not_the_fault_of_one():
    at = {
        0: waits(PAIR, 0, Op.BW, Op.RECV_GRAD),
        1: waits(PAIR, 1),
    }
    assert judge(PAIR, at) is None


def test_a_message_on_its_way_indicts_nobody():
    """Its sender is past making it: the link may be at fault."""
    past = computes(PAIR, 0, Op.BW)
    past = msgspec.structs.replace(past, compute_waits=True, receives=())
    assert judge(PAIR, {0: past, 1: waits(PAIR, 1)}) is None


def test_who_moved_lately_is_not_suspected():
    at = {0: computes(PAIR, 0, since_s=5.0), 1: waits(PAIR, 1)}
    assert judge(PAIR, at, least_s=10.0) is None
    assert judge(PAIR, at, least_s=5.0) is not None


def test_a_declared_pause_is_exempt():
    """[T27] Compiling or saving may take as long as was declared."""
    pause = Pause(number=1, reason="compiles", at_most_s=300.0)
    at = {0: computes(PAIR, 0, pause=pause), 1: waits(PAIR, 1)}
    assert judge(PAIR, at) is None


def test_answers_that_are_missing_are_waited_for():
    """Neither an answer nor a verdict that there is none: not yet."""
    assert judge(PAIR, {1: waits(PAIR, 1)}) is None


@pytest.mark.parametrize("hung", [0, 1])
def test_within_a_group_the_one_that_has_entered_fewer_collectives_is_the_suspect(hung: int):
    """Both members are in the same F: one waits in its sum for the other, which computes."""
    at = {rank: computes(QUAD, rank, collectives=7 if rank == hung else 8) for rank in (0, 1)} | {
        rank: waits(QUAD, rank) for rank in (2, 3)
    }
    found = judge(QUAD, at)
    assert found is not None
    assert found.rank == hung


def test_members_of_a_group_that_are_in_the_same_collective_are_a_tie():
    """Nobody is missing: the collective itself does not end."""
    at = {rank: computes(QUAD, rank, collectives=8) for rank in (0, 1)}
    assert judge(QUAD, at | {rank: waits(QUAD, rank) for rank in (2, 3)}) is None


def test_a_rank_that_is_idle_while_all_wait_in_the_vote_is_the_suspect():
    """It has not entered what the others wait in."""
    plan = Planner(job_of(1, 1, 3)).initial().plan
    voting = {rank: runs(comm=first(plan, rank, Op.STEP)) for rank in (0, 2)}
    found = judge(plan, voting | {1: computes(plan, 1)})
    assert found is not None
    assert found.rank == 1


def test_nobody_is_missing_in_a_vote_that_all_have_entered():
    plan = Planner(job_of(1, 1, 3)).initial().plan
    assert judge(plan, {rank: runs(comm=first(plan, rank, Op.STEP)) for rank in (0, 1, 2)}) is None


@given(st.data())
def test_whatever_ranks_say_at_most_one_is_suspected_and_only_if_all_others_wait(data):
    """For any answers: the suspect is no rank that waits, pauses or has just moved."""
    at: dict[int, At] = {}
    silent: list[int] = []
    for rank in QUAD.active_ranks:
        size = len(expand(QUAD, rank).instrs)
        if data.draw(st.booleans()):
            silent.append(rank)
            continue
        receives = [i for i, x in enumerate(expand(QUAD, rank).instrs) if x.op.is_receive]
        at[rank] = runs(
            step=data.draw(st.integers(2, 4)),
            compute=data.draw(st.integers(-1, size - 1)),
            compute_waits=data.draw(st.booleans()),
            comm=data.draw(st.integers(-1, size - 1)),
            comm_waits=data.draw(st.booleans()),
            receives=tuple(data.draw(st.lists(st.sampled_from(receives), max_size=2))),
            collectives=data.draw(st.integers(0, 3)),
            since_s=data.draw(st.sampled_from([0.0, LONG])),
        )
    found = judge(QUAD, at, *silent)
    if found is not None:
        assert found.rank in QUAD.active_ranks
        mine = at.get(found.rank)
        assert mine is None or (mine.since_s >= 10.0 and not mine.compute_waits)
        assert set(silent) <= {found.rank}
