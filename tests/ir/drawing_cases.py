"""Plans with their times, ready to be drawn."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from plan_build import MODEL

from resihp.compiler import initial_plan
from resihp.compiler.facts import facts_of
from resihp.ir.drawing.scene import Clock, Played
from resihp.ir.lanes import alike, lanes_of
from resihp.ir.model import Batch, Mesh, Plan
from resihp.ir.playback import play_back

UNITS = Clock("unit", "units of time")


def played(plan: Plan, *, with_memory: bool = True, **more) -> Played:
    """A plan in units of time."""
    kinds = alike(plan)
    lanes = lanes_of(plan, kinds.keys())
    timeline = play_back(plan, lanes)
    facts = facts_of(plan) if with_memory else None
    return Played(plan, lanes, timeline, UNITS, kinds, facts)._replace(**more)


def healthy(schedule: str, *, pp: int = 4, dp: int = 1, microbatches: int = 8, tp: int = 1) -> Plan:
    """Every replica does the same, in the order `schedule`."""
    model = msgspec.structs.replace(MODEL, layers=4 * pp)
    batch = Batch(microbatches=microbatches, tokens=16)
    return initial_plan(model, Mesh(tp=tp, pp=pp, dp=dp), batch, schedule=schedule)


def paired(plan: Plan) -> Plan:
    """With every B and the W that follows it overlapped."""
    streams = []
    for stream in plan.streams:
        body = list(stream.body)
        for index, (one, other) in enumerate(pairwise(body)):
            if one.op.is_compute and other.op.is_compute and not body[index - 1].paired:
                body[index] = msgspec.structs.replace(one, paired=True)
        streams.append(msgspec.structs.replace(stream, body=tuple(body)))
    return msgspec.structs.replace(plan, streams=tuple(streams))
