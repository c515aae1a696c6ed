"""Transfers that share links: who posts first goes first, and nobody is faster than alone."""

from __future__ import annotations

import random

import msgspec
import pytest
from plan_cases import plan_of
from plan_generator import as_schedule, generate
from random_prices import random_lengths, random_pricing

from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate import Simulation, simulate
from resihp.compiler.simulate.contention import loads_of
from resihp.compiler.simulate.prices import prices_of
from resihp.compiler.simulate.times import play
from resihp.ir.model import Level


@pytest.mark.parametrize("part", range(2))
def test_a_transfer_begins_once_all_that_were_posted_before_have_left_its_links(part):
    """And not later; the delays that come of it explain all times."""
    for seed in range(part * 40, part * 40 + 40):
        rng = random.Random(seed)
        plan = generate(rng)
        plan = as_schedule(plan) if rng.random() < 0.3 else plan
        pricing = random_pricing(plan, rng)
        lengths = random_lengths(plan, rng) if rng.random() < 0.5 else None
        simulation = simulate(plan, pricing, lengths=lengths, contention=True)
        again = play(simulation.course, simulation.prices)
        assert again.start == pytest.approx(simulation.start, abs=1e-9)
        assert again.end == pytest.approx(simulation.end, abs=1e-9)
        check_queues(simulation)


def check_queues(simulation: Simulation) -> None:
    """Each transfer against all others that share a link with it."""
    course, pricing, places = simulation.course, simulation.pricing, simulation.places
    loads, sent = loads_of(course, pricing, places), course.crossings.sent
    is_schedule = simulation.plan.level is Level.SCHEDULE
    posted = (simulation.end if is_schedule else simulation.start)[sent]
    begin = posted + simulation.prices.delay - prices_of(course, pricing, places).delay
    end = begin + loads.occupied
    links = [set(used) for used in loads.links]
    for mine in range(len(sent)):
        others = [
            other for other in range(len(sent)) if other != mine and links[mine] & links[other]
        ]
        before = [end[other] for other in others if posted[other] < posted[mine] - 1e-12]
        together = [end[other] for other in others if abs(posted[other] - posted[mine]) <= 1e-12]
        earliest = max([posted[mine], *before])
        choices = [earliest, *(time for time in together if time > earliest)]
        assert min(abs(begin[mine] - choice) for choice in choices) < 1e-9
        for other in others:
            apart = end[other] <= begin[mine] + 1e-9 or end[mine] <= begin[other] + 1e-9
            assert apart or min(loads.occupied[mine], loads.occupied[other]) == 0


def test_links_that_are_never_busy_change_nothing():
    for seed in range(30):
        rng = random.Random(seed)
        plan = generate(rng)
        pricing = random_pricing(plan, rng)
        costs = msgspec.structs.replace(pricing.costs, boundary_bytes_per_token=0)
        free = Pricing(plan.model, costs, pricing.cluster, pricing.health)
        contended, alone = simulate(plan, free, contention=True), simulate(plan, free)
        assert contended.iteration_s == pytest.approx(alone.iteration_s)


def test_replicas_of_a_node_share_its_adapter():
    """Two replicas whose stages lie on the same two nodes take longer together than one alone."""
    plan = plan_of(tp=1, pp=2, dp=2, microbatches=8)
    # Ranks 0 and 2 hold the first stages, 1 and 3 the second ones; two devices per node.
    moved = {0: 0, 1: 2, 2: 1, 3: 3}
    groups = tuple(
        msgspec.structs.replace(group, ranks=tuple(moved[rank] for rank in group.ranks))
        for group in plan.groups
    )
    plan = msgspec.structs.replace(plan, groups=groups)
    rng = random.Random(7)
    pricing = random_pricing(plan, rng)
    cluster = msgspec.structs.replace(
        pricing.cluster,
        cluster=msgspec.structs.replace(
            pricing.cluster.cluster, nodes=2, gpus_per_node=2, nics_per_node=1
        ),
    )
    costs = msgspec.structs.replace(pricing.costs, boundary_bytes_per_token=2000)
    shared = Pricing(plan.model, costs, cluster, pricing.health)
    alone = simulate(plan, shared).iteration_s
    assert simulate(plan, shared, contention=True).iteration_s > 1.2 * alone
    two = msgspec.structs.replace(
        cluster, cluster=msgspec.structs.replace(cluster.cluster, nics_per_node=2)
    )
    apart = Pricing(plan.model, costs, two, pricing.health)
    assert simulate(plan, apart, contention=True).iteration_s < (
        simulate(plan, shared, contention=True).iteration_s
    )
