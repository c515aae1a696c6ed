"""`lower` against the oracles: what it makes of any schedule runs, under the transport named."""

from __future__ import annotations

import random

import msgspec
import plan_oracle
import pytest
import transport_oracle
from plan_generator import EXECUTABLE, LARGE, as_schedule, generate
from plan_runner import Runner

from resihp.compiler.lower import everywhere, lower
from resihp.ir.model import Plan


def schedule_of(seed: int, limits=LARGE) -> Plan:
    return as_schedule(generate(random.Random(seed), limits))


@pytest.mark.parametrize("transport", ["edge", "pair", "rank", "eager=0"])
def test_lowered_schedules_run_to_their_end(transport):
    """Nothing is missing, nothing too much, and nobody waits in a circle."""
    for seed in range(60):
        schedule = msgspec.structs.replace(schedule_of(seed), transport=transport)
        plan = lower(schedule, scatter=everywhere if seed % 3 == 0 else None)
        plan_oracle.run(plan)
        assert transport_oracle.finishes(plan, transport, plan.batch.tokens * 32), seed


def test_lowered_schedules_train_right():
    """Run for real, their gradient is that of one process."""
    with Runner() as runner:
        for seed in range(15):
            outcome = runner.run(lower(schedule_of(seed, EXECUTABLE)))
            assert outcome.verdict == "right", (seed, outcome)
