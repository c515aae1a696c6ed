"""From what was planned to a verified plan.

Only memory may be short, since the planner does not know buffers and sums of gradients to the
byte. What else the verifier refuses is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from resihp.compiler.adaptation.layouts import Layout, on_layout, supplied
from resihp.compiler.adaptation.problems import PLANNED_ORDER
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.facts import facts_of
from resihp.compiler.lower import lower
from resihp.compiler.pricing import Pricing
from resihp.compiler.simulate import Simulation
from resihp.ir.diagnostics import Severity
from resihp.ir.model import Group, GroupName, Level, Plan, Stream
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.verify import verify

__all__ = ["Checked", "check", "lacking_bytes", "lowered", "with_streams"]


class Checked(NamedTuple):
    """A plan, and its text as it was verified."""

    plan: Plan
    text: str


def lowered(
    situation: Situation, layout: Layout, streams: Sequence[Stream], *, order: str = PLANNED_ORDER
) -> Plan:
    """The plan that runs `streams` of a schedule on `layout`; `order` says who made them."""
    plan = on_layout(situation, supplied(situation, layout))
    return with_streams(plan, streams, situation.pricing, order=order)


def with_streams(
    plan: Plan, streams: Sequence[Stream], pricing: Pricing, *, order: str = PLANNED_ORDER
) -> Plan:
    """`plan` with `streams` of a schedule in place of its own, lowered."""
    schedule = msgspec.structs.replace(
        plan,
        streams=(*streams, *_idle(plan.groups, streams)),
        schedule=order,
        level=Level.SCHEDULE,
    )
    return lower(schedule, scatter=pricing.scatter(plan.batch.tokens))


def _idle(groups: Iterable[Group], streams: Iterable[Stream]) -> list[Stream]:
    """Streams of groups without work: they only take part in the reduction and the step."""
    busy = {(replica, stream.pp) for stream in streams for replica in stream.replicas}
    idle: dict[int, list[int]] = {}
    for group in groups:
        if group.name not in busy:
            idle.setdefault(group.pp, []).append(group.replica)
    return [Stream(replicas=tuple(replicas), pp=pp, body=()) for pp, replicas in idle.items()]


def lacking_bytes(simulation: Simulation) -> dict[GroupName, int]:
    """What each group of a plan lacks on its devices, where one does.

    Asked before the verifier, which takes far longer to say in words what is wrong.
    """
    plan, arrays = simulation.plan, simulation.arrays
    capacity = plan.memory_bytes
    if capacity is None:
        return {}
    lanes = arrays.lanes
    peaks = simulation.memory.peaks(lanes)
    over: dict[int, list[tuple[int, int]]] = {}
    for lane in np.flatnonzero(peaks > capacity).tolist():
        lacks = int(lanes.pp[lane]), int(peaks[lane]) - capacity
        over.setdefault(int(lanes.replica[lane]), []).append(lacks)
    return {
        GroupName(replica, pp): num_bytes
        for replica, stand_in in enumerate(arrays.stands_for.tolist())
        for pp, num_bytes in over.get(stand_in, ())
    }


def check(situation: Situation, plan: Plan) -> Checked:
    """Verify the text of `plan` against the plan before."""
    text = print_plan(plan)
    parsed = parse(text)
    assert parsed.plan == plan, "a plan is what its text says"
    findings = verify(parsed, previous=situation.held, facts=facts_of)
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    assert not errors, f"the verifier refuses a plan of ours: {errors[0].code} {errors[0].message}"
    return Checked(plan, text)
