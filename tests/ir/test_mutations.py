"""The verifier against running the plan: mutants are refused exactly if they cannot run.

Every mutant differs from a right plan by one instruction that is dropped, doubled, moved, swapped
with another, or given another micro-batch or operation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import plan_oracle
import pytest
import transport_oracle
from plan_build import make_plan

from resihp.ir.model import GroupName, Instr, Op, Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.verify import verify

PLANS: dict[str, Plan] = {
    "1f1b": make_plan(pp=3, microbatches=4),
    "1f1b-split": make_plan(pp=2, dp=2, microbatches=3, split=True),
    "gpipe": make_plan(pp=3, microbatches=3, order="gpipe", split=True),
    "scattered": make_plan(pp=2, tp=2, microbatches=3, scatter=True, order="gpipe"),
    "unequal": make_plan(pp=3, tp=2, microbatches=3, degrees={GroupName(0, 1): 1}),
    "dropped": make_plan(pp=2, dp=2, microbatches=2, gone={1: 0}, split=True),
    "shared": make_plan(pp=2, dp=3, microbatches=3, share=True),
    "shared-dropped": make_plan(pp=2, dp=4, microbatches=2, gone={2: 1}, share=True),
    "one-stage": make_plan(pp=1, dp=2, microbatches=3, split=True),
}
NUM_MUTANTS = 200
"""Per plan."""


def mutate(body: Sequence[Instr], plan: Plan, rng: random.Random) -> tuple[Instr, ...]:
    """One body with one mistake (which now and then is none)."""
    instrs = list(body)
    at, other = rng.randrange(len(instrs)), rng.randrange(len(instrs))
    match rng.choice(("drop", "double", "move", "swap", "next", "retarget", "op")):
        case "drop":
            del instrs[at]
        case "double":
            instrs.insert(other, instrs[at])
        case "move":
            instrs.insert(other, instrs.pop(at))
        case "swap":
            instrs[at], instrs[other] = instrs[other], instrs[at]
        case "next":
            after = min(at + 1, len(instrs) - 1)
            instrs[at], instrs[after] = instrs[after], instrs[at]
        case "retarget" if instrs[at].op.has_micro_batch:
            number = rng.randrange(plan.batch.microbatches + 1)
            instrs[at] = Instr(instrs[at].op, number, rng.choice((None, 0, 1)))
        case _ if instrs[at].op.has_micro_batch:
            op = rng.choice([op for op in Op if op.has_micro_batch])
            instrs[at] = Instr(op, instrs[at].microbatch, instrs[at].home)
        case _:
            del instrs[at]
    return tuple(instrs)


TRANSPORTS = ("edge", "pair", "rank", "eager=0", "eager=4096", "eager=8192")
"""An activation of these plans has 4096 bytes."""


def can_run(plan: Plan, transport: str) -> bool:
    """What the oracles think."""
    try:
        plan_oracle.run(plan)
    except plan_oracle.RefusedError:
        return False
    return transport_oracle.finishes(plan, transport, 4096)


@pytest.mark.parametrize("name", PLANS)
def test_the_verifier_agrees_with_running_the_plan(name):
    """Accepted plans run to the end with the right work done; refused ones do not."""
    plan, rng = PLANS[name], random.Random(name)
    refused = 0
    assert plan.batch.tokens * plan.model.hidden * 4 == 4096
    for _ in range(NUM_MUTANTS):
        index = rng.randrange(len(plan.streams))
        streams = list(plan.streams)
        stream = streams[index]
        streams[index] = msgspec.structs.replace(stream, body=mutate(stream.body, plan, rng))
        mutant = msgspec.structs.replace(plan, streams=tuple(streams))
        text = print_plan(mutant)
        transport = rng.choice(TRANSPORTS)
        findings = verify(parse(text), transport=transport)
        assert (not findings) == can_run(mutant, transport), (transport, findings, text)
        refused += bool(findings)
    assert refused > NUM_MUTANTS // 2


@pytest.mark.parametrize("name", PLANS)
def test_the_plans_before_mutation_run(name):
    """Otherwise agreeing that mutants fail would mean nothing."""
    plan_oracle.run(PLANS[name])
    assert verify(parse(print_plan(PLANS[name]))) == []
