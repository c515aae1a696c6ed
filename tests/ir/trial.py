"""One random plan or mutant by its seed, and what verifier, oracle and real run say of it."""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec
import numpy as np
import plan_oracle
import transport_oracle
from plan_generator import EXECUTABLE, LARGE, as_schedule, generate
from plan_mutator import ABOVE, ORDER, SUBTLE, mutate

from resihp.errors import PlanSyntaxError
from resihp.ir.model import Level, Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.verify import verify

assert np  # the verifier tries its quick proof of small plans only where numpy is there already
TRANSPORTS = ("edge", "edge", "pair", "rank", "eager=0", "eager=128", "eager=256", "eager=512")
"""A whole activation of generated plans has 128 or 256 bytes."""


KINDS = ((), (), (), SUBTLE, SUBTLE, *[ORDER] * 4, (*ABOVE, "near", "unshare"))
"""What mutants are made by; the first three are all mutations of instructions."""


class Case(NamedTuple):
    """What a seed stands for."""

    seed: int
    plan: Plan
    mutations: tuple[str, ...]
    """Empty for a right plan."""
    transport: str


def case_of(seed: int) -> Case:
    """One in five a right plan, one in five of all a schedule; under any transport."""
    rng = random.Random(seed)
    plan = generate(rng, rng.choice((LARGE, EXECUTABLE)))
    if rng.random() < 0.2:
        plan = as_schedule(plan)
    mutations: tuple[str, ...] = ()
    if rng.random() < 0.8:
        plan, mutations = mutate(plan, rng, among=rng.choice(KINDS))
    transport = "edge" if plan.level is Level.SCHEDULE else rng.choice(TRANSPORTS)
    if rng.random() < 0.3:
        plan = msgspec.structs.replace(plan, transport=transport)
    return Case(seed, plan, mutations, transport)


def executable_case_of(seed: int) -> Case:
    """One in five a right plan, the others mutants, mostly subtle ones; few ranks, `edge`."""
    rng = random.Random(-1 - seed)
    plan = generate(rng, EXECUTABLE)
    mutations: tuple[str, ...] = ()
    if rng.random() < 0.8:
        plan, mutations = mutate(plan, rng, among=rng.choice(KINDS))
    return Case(seed, plan, mutations, "edge")


def why_refused(case: Case) -> str | None:
    """What the oracles have against the plan."""
    try:
        plan_oracle.run(case.plan)
    except plan_oracle.RefusedError as refused:
        return str(refused)
    if case.plan.level is Level.SCHEDULE:
        return None
    whole_bytes = case.plan.batch.tokens * case.plan.model.hidden * 4
    if transport_oracle.finishes(case.plan, case.transport, whole_bytes):
        return None
    return f"hangs under {case.transport}"


def findings_of(case: Case) -> tuple[str, ...]:
    """The codes of what the reader or the verifier has against the plan's text.

    With and without the quick proof it is the same.
    """
    try:
        parsed = parse(print_plan(case.plan))
    except PlanSyntaxError as error:
        return tuple(sorted({finding.code for finding in error.diagnostics}))
    transport = None if case.plan.transport else case.transport
    found = verify(parsed, transport=transport, quick_proof=False)
    assert verify(parsed, transport=transport) == found, case
    return tuple(sorted({finding.code for finding in found}))
