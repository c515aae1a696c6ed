"""From what was planned to a verified plan. What the verifier refuses here is a bug of ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from resihp.compiler.adaptation.layouts import Layout, on_layout
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.facts import facts_of
from resihp.compiler.lower import lower
from resihp.ir.diagnostics import Diagnostic, Severity
from resihp.ir.model import GroupName, Level, Plan, Stream
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.verify import verify

__all__ = ["Checked", "check", "lowered"]

_OVER_MEMORY = ("RHP601", "RHP602")


class Checked(NamedTuple):
    """A plan, its text, and whether a device has too little memory for it."""

    plan: Plan
    text: str
    over_memory: bool


def lowered(situation: Situation, layout: Layout, streams: Sequence[Stream]) -> Plan:
    """The plan that runs `streams` of a schedule on `layout`."""
    schedule = msgspec.structs.replace(
        on_layout(situation, layout),
        streams=(*streams, *_idle(layout, streams)),
        level=Level.SCHEDULE,
    )
    return lower(schedule, scatter=situation.pricing.scatter(schedule.batch.tokens))


def _idle(layout: Layout, streams: Iterable[Stream]) -> list[Stream]:
    """Streams of groups without work: they only take part in the reduction and the step."""
    busy = {(replica, stream.pp) for stream in streams for replica in stream.replicas}
    idle: dict[int, list[int]] = {}
    for group in layout.groups:
        if group.name not in busy:
            idle.setdefault(group.pp, []).append(group.replica)
    return [Stream(replicas=tuple(replicas), pp=pp, body=()) for pp, replicas in idle.items()]


def check(situation: Situation, plan: Plan) -> Checked:
    """Verify the text of `plan` against the plan before. Only memory may be short."""
    text = print_plan(plan)
    parsed = parse(text)
    assert parsed.plan == plan, "a plan is what its text says"
    found = verify(parsed, previous=situation.previous, facts=facts_of)
    errors = [finding for finding in found if finding.severity is Severity.ERROR]
    others = [finding for finding in errors if finding.code not in _OVER_MEMORY]
    assert not others, f"the verifier refuses a plan of ours: {_spell(others[0])}"
    return Checked(plan, text, bool(errors))


def _spell(finding: Diagnostic) -> str:
    return f"{finding.code} {finding.message}"


def shortages(plan: Plan) -> dict[GroupName, int]:
    """Bytes that each group of a plan lacks, where one does."""
    from resihp.compiler.capacity import oversized

    return {each.group.name: each.needed_bytes - each.capacity_bytes for each in oversized(plan)}
