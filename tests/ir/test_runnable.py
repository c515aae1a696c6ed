"""Plans of the language that this executor does not run are refused in words."""

from __future__ import annotations

import msgspec
import pytest

from resihp.compiler import initial_plan
from resihp.errors import UserError
from resihp.ir.model import (
    Batch,
    GroupName,
    Instr,
    LayerRange,
    Level,
    Load,
    Mesh,
    ModelShape,
    Move,
    Op,
    Plan,
    Restore,
)
from resihp.ir.runnable import check_runnable

SHAPE = ModelShape(name="tiny", layers=4, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=128)
PLAN = initial_plan(
    SHAPE,
    Mesh(tp=1, pp=2, dp=2),
    Batch(microbatches=2, tokens=16),
    schedule="1f1b",
    memory_bytes=None,
)


def with_first_instr(**changes) -> Plan:
    first = PLAN.streams[0]
    body = (msgspec.structs.replace(first.body[0], **changes), *first.body[1:])
    streams = (msgspec.structs.replace(first, body=body), *PLAN.streams[1:])
    return msgspec.structs.replace(PLAN, streams=streams)


def with_two_stages() -> Plan:
    group = PLAN.groups[0]
    first, last = group.layers[0]
    halves = (LayerRange(first, first), LayerRange(first + 1, last))
    group = msgspec.structs.replace(group, layers=halves)
    return msgspec.structs.replace(PLAN, groups=(group, *PLAN.groups[1:]))


LOAD = Load(layers=LayerRange(0, 0), step=3, target=GroupName(0, 0))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (msgspec.structs.replace(PLAN, level=Level.SCHEDULE), "it is a schedule"),
    ],
)
def test_what_is_not_there_yet_is_refused(plan: Plan, reason: str):
    """The user's plan, not our bug: the message says what stands in the way."""
    with pytest.raises(UserError, match="this executor does not run such plans yet") as caught:
        check_runnable(plan)
    assert reason in str(caught.value)


def test_plans_of_the_compiler_run():
    """Also with state from ranks, snapshots and checkpoints, and with spelled defaults."""
    check_runnable(PLAN)
    move = Move(layers=LayerRange(0, 0), source=1, target=0)
    restore = Restore(layers=LayerRange(0, 0), source=1, giver=2, target=GroupName(0, 0))
    for line in (move, restore, LOAD):
        check_runnable(msgspec.structs.replace(PLAN, reconfigure=(line,)))
    stream = PLAN.streams[0]
    body = tuple(
        msgspec.structs.replace(instr, peer=0) if instr.op.is_transfer else instr
        for instr in (Instr(Op.GATHER_PARAMS), *stream.body)
    )
    one = msgspec.structs.replace(stream, replicas=(0,), body=body)
    check_runnable(msgspec.structs.replace(PLAN, streams=(one,)))


def test_several_stages_pairs_and_bf16_run():
    """Nothing in the streams is too much."""
    check_runnable(with_two_stages())
    check_runnable(with_first_instr(paired=True))
    check_runnable(msgspec.structs.replace(PLAN, precision="bf16"))


def test_a_replica_may_run_one_stage_of_another_replica_s_micro_batch():
    """Programs name every peer, so where a tensor comes from makes no difference."""
    check_runnable(with_first_instr(op=Op.SEND_ACT, peer=1))
