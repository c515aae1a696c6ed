"""Fleets run real ranks of plans, say which one fails, and go on afterwards."""

from __future__ import annotations

import os

import pytest
import torch
from fleet import Fleet, FleetError
from run_work import Site, generation

from resihp.compiler import initial_plan
from resihp.ir.model import Batch, Mesh, ModelShape

SHAPE = ModelShape(name="tiny", layers=2, hidden=8, heads=2, kv_heads=2, ffn=8, vocab=16)
PLAN = initial_plan(SHAPE, Mesh(tp=1, pp=2, dp=2), Batch(microbatches=2, tokens=4))


async def add_up(site: Site) -> tuple[float, int, int]:
    """The sum of all ranks, how many plans this one has seen, and its process."""
    total = torch.tensor([float(site.rank)])
    async with generation(site) as groups:

        def work() -> None:
            groups.build("world", site.plan.active_ranks).all_reduce_(total)

        await site.device.comm.submit(work).wait_async()
    site.memory["plans"] = site.memory.get("plans", 0) + 1
    return float(total), site.memory["plans"], os.getpid()


async def fail_on_two(site: Site) -> None:
    if site.rank == 2:
        raise ValueError("on purpose")


@pytest.fixture(scope="module")
def fleet():
    with Fleet(2, quiet=True) as fleet:
        yield fleet


def test_ranks_are_dealt_out_and_stay_where_they_are(fleet):
    """Four ranks of two processes meet in one group; what they remember is there the next time."""
    fleet.end()
    first, second = fleet.run(PLAN, add_up), fleet.run(PLAN, add_up)
    assert {total for total, _, _ in first.values()} == {0.0 + 1.0 + 2.0 + 3.0}
    assert [plans for _, plans, _ in second.values()] == [2] * 4
    places = {rank: process for rank, (_, _, process) in first.items()}
    assert places[0] == places[1] != places[2] == places[3]
    assert places == {rank: process for rank, (_, _, process) in second.items()}
    fleet.forget()
    assert {plans for _, plans, _ in fleet.run(PLAN, add_up).values()} == {1}


def test_a_failure_names_its_rank_and_the_next_plan_runs(fleet):
    """In new processes: the old ones may be stuck."""
    num_teams = fleet.num_teams
    with pytest.raises(FleetError, match="rank 2: ValueError: on purpose"):
        fleet.run(PLAN, fail_on_two)
    assert len(fleet.run(PLAN, add_up)) == 4
    assert fleet.num_teams == num_teams + 1
