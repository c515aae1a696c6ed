"""What all ranks do together at the end of an iteration, whoever was asked for it."""

from __future__ import annotations

import asyncio

import pytest
from boundary_crew import Asked, Yielded, train_until_asked
from fleet import Fleet
from parity_bounds import job_of
from parity_cases import healthy
from parity_crew import TrainTo, leave

from resihp.executor.boundary import Agreement, Ask, Boundary
from resihp.wire.messages import Commit

NUM_STEPS = 6


@pytest.fixture(scope="module")
def fleet():
    with Fleet(2) as fleet:
        yield fleet


def run(fleet: Fleet, rank: int, after: int) -> list[Yielded]:
    plan = healthy(2, 2, 1, "1f1b")[0].plan
    commit = Commit(version=0, updates=0, record=None)
    order = TrainTo(job_of("untied", plan.mesh, "bitwise", "fp32"), NUM_STEPS, None, 0, commit)
    ends = fleet.run(plan, train_until_asked, Asked(order, rank, after))
    fleet.run(plan, leave)
    return [ends[rank] for rank in plan.active_ranks]


@pytest.mark.parametrize("rank", [0, 3])
def test_all_ranks_yield_after_the_same_step_whoever_was_asked(fleet: Fleet, rank: int):
    """No iteration is lost: every rank holds the step that it voted for, and losses are the same
    as without it."""
    whole = run(fleet, -1, 0)
    assert [(end.yielded, end.version, end.finished) for end in whole] == [(False, 6, True)] * 4
    ends = run(fleet, rank, 2)
    first = ends[0]
    assert ends == [first] * 4
    assert first.yielded
    assert not first.finished
    assert 2 < first.version < NUM_STEPS
    assert first.settled == (first.version, first.version)
    assert first.losses == whole[0].losses[: first.version]


def test_a_wish_stays_until_a_vote_has_brought_it():
    """One that comes between a rank's contribution and the outcome is brought to the next vote."""
    agreement = Agreement()
    agreement.ask(Ask.AUDIT)
    assert agreement.brought() == Ask.AUDIT
    agreement.ask(Ask.CHECKPOINT)
    agreement.agree(Ask.AUDIT)
    assert (agreement.agreed, agreement.brought()) == (Ask.AUDIT, Ask.CHECKPOINT)
    agreement.clear()
    assert agreement.agreed == agreement.brought() == Ask.NOTHING


@pytest.mark.parametrize("what", ["yield", "checkpoint", "audit"])
def test_what_a_message_asks_for_is_a_bit_of_the_vote(what: str):
    assert Ask.of(what).name == what.upper()


def test_duties_are_done_in_order_and_know_what_was_agreed():
    """Before the generation ends here, if it does."""
    done: list[tuple[str, int, Ask]] = []

    def duty(name: str):
        async def act(version: int, agreed: Ask) -> None:
            done.append((name, version, agreed))

        return act

    async def cross(agreed: Ask) -> bool:
        agreement = Agreement()
        agreement.agree(agreed)
        return await Boundary(agreement, [duty("a"), duty("b")]).cross(5)

    assert not asyncio.run(cross(Ask.AUDIT))
    assert asyncio.run(cross(Ask.YIELD | Ask.CHECKPOINT))
    both = Ask.YIELD | Ask.CHECKPOINT
    assert done == [("a", 5, Ask.AUDIT), ("b", 5, Ask.AUDIT), ("a", 5, both), ("b", 5, both)]
