"""The verifier and the slow oracles agree about random plans, schedules and mutants.

Under every transport. `make oracle` asks about many more.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import transport_oracle
from memory_oracle import Ledger
from plan_generator import generate
from trial import case_of, findings_of, why_refused

from resihp.ir.expand import expand
from resihp.ir.facts import Facts, StageFacts
from resihp.ir.lanes import lanes_of
from resihp.ir.model import Plan
from resihp.ir.timeline import play
from resihp.ir.verify.memory import peaks_of

NUM_SEEDS = 600


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 100))
def test_what_is_found_is_what_cannot_run(first):
    """No finding where the oracle sees the plan run to its end, some where it does not."""
    seen: Counter[bool] = Counter()
    for seed in range(first, first + 100):
        case = case_of(seed)
        found, why = findings_of(case), why_refused(case)
        assert (not found) == (why is None), (seed, case.mutations, case.transport, found, why)
        seen[not found] += 1
    assert min(seen.values()) > 20


def test_the_timeline_is_as_long_as_times_relaxed_until_none_changes():
    """With several stages, pairs and messages between replicas."""
    for seed in range(100):
        plan = generate(random.Random(seed))
        assert play(lanes_of(plan)).makespan == transport_oracle.makespan(plan), seed


def test_programs_post_the_messages_of_the_simulated_ranks():
    """Instruction by instruction, the same ranks at the other end, in the same order."""
    for seed in range(60):
        plan = generate(random.Random(seed))
        for number, rank in transport_oracle.ranks_of(plan, 0).items():
            for index, instr in enumerate(expand(plan, number).instrs):
                ends = [(m.source, m.target) for m in rank.posts.get(index, ())]
                peers = [target if source == number else source for source, target in ends]
                posted = instr.transfers if instr.op.is_transfer else ()
                assert [transfer.peer for transfer in posted] == peers, (seed, number, index)


def random_facts(plan: Plan, rng: random.Random) -> Facts:
    def sizes() -> StageFacts:
        released, activation = sorted(rng.sample(range(50), 2))
        return StageFacts(
            state_bytes=rng.randrange(50),
            activation_bytes=activation,
            released_by_b_bytes=released,
            weight_input_grad_bytes=rng.randrange(20),
            boundary_bytes=40,
        )

    return Facts(stages={g.name: tuple(sizes() for _ in g.layers) for g in plan.groups})


def test_peak_memory_is_never_below_that_of_a_ledger():
    """And seldom above: only where an early proof that a send was taken is overlooked."""
    above: list[bool] = []
    for seed in range(120):
        rng = random.Random(seed)
        plan = generate(rng)
        facts = random_facts(plan, rng)
        for name, peak in peaks_of(lanes_of(plan), facts).items():
            least = Ledger(plan, name, facts).peak()
            assert peak >= least, (seed, name)
            above.append(peak > least)
    assert sum(above) < len(above) / 10
