"""The oracles among themselves: generator, slow verifier, transports and real runs agree."""

from __future__ import annotations

import random
from collections import Counter

import plan_oracle
import pytest
import transport_oracle
from plan_generator import EXECUTABLE, LARGE, as_schedule, generate
from plan_mutator import ABOVE, MUTATIONS, mutate

from resihp.ir.model import Op, Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan


def tensor_bytes(plan: Plan) -> int:
    return plan.batch.tokens * plan.model.hidden * 4


@pytest.mark.parametrize("limits", [LARGE, EXECUTABLE])
def test_generated_plans_and_their_schedules_run(limits):
    """The slow verifier accepts what the generator makes."""
    for seed in range(150):
        plan = generate(random.Random(seed), limits)
        assert len(plan.active_ranks) <= limits.num_ranks
        plan_oracle.run(plan)
        plan_oracle.run(as_schedule(plan))


def test_generated_plans_use_the_whole_language():
    """Each of a hundred plans lacks much, all together lack nothing."""
    plans = [generate(random.Random(seed)) for seed in range(100)]
    instrs = [instr for plan in plans for stream in plan.streams for instr in stream.body]
    assert {instr.op for instr in instrs} == set(Op)
    for found in (
        any(instr.paired for instr in instrs),
        any(instr.peer is not None for instr in instrs),
        any(instr.home is not None for instr in instrs),
        any(len(group.layers) > 1 for plan in plans for group in plan.groups),
        any(len({group.tp for group in plan.groups}) > 1 for plan in plans),
        any(len(plan.groups) < plan.mesh.dp * plan.mesh.pp for plan in plans),
        any(len(stream.replicas) > 1 for plan in plans for stream in plan.streams),
    ):
        assert found


def test_generated_plans_can_be_written_down():
    """Mutants too: what is read back is the same plan."""
    for seed in range(60):
        rng = random.Random(seed)
        plan = generate(rng)
        for wanted in (plan, as_schedule(plan), mutate(plan, rng)[0]):
            assert parse(print_plan(wanted)).plan == wanted


def test_a_stricter_transport_lets_fewer_plans_end():
    """Every generated plan ends under `edge`; those that end under `rank` end under `pair`."""
    ends: Counter[str] = Counter()
    growing = ("eager=0", "eager=128", "eager=256", "eager=1000000")
    for seed in range(100):
        plan = generate(random.Random(seed), EXECUTABLE)
        verdict = {
            name: transport_oracle.finishes(plan, name, tensor_bytes(plan))
            for name in ("edge", "pair", "rank", *growing)
        }
        assert verdict["edge"] and verdict["eager=1000000"]
        assert verdict["pair"] or not verdict["rank"]
        assert sorted(map(verdict.__getitem__, growing)) == [verdict[name] for name in growing]
        ends.update(name for name, finishes in verdict.items() if finishes)
    assert 20 < ends["rank"] < ends["eager=0"] < ends["edge"]


@pytest.mark.parametrize("name", [*MUTATIONS, *ABOVE])
def test_every_mutation_makes_mistakes(name):
    """Many of the plans that it changes cannot run any more."""
    refused = 0
    for seed in range(30):
        rng = random.Random(seed)
        mutant, names = mutate(generate(rng), rng, among=(name,))
        assert set(names) <= {name}
        try:
            plan_oracle.run(mutant)
        except plan_oracle.RefusedError:
            refused += 1
    assert refused > 2
