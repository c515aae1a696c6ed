"""Plans are written as torch's CSV, or what torch cannot say is named."""

from __future__ import annotations

import msgspec
import pytest
from plan_build import make_plan

from resihp.errors import UserError
from resihp.ir.model import GroupName, Instr, LayerRange, Level, Load, Op, Resume
from resihp.ir.torch_csv import read_torch_csv
from resihp.ir.torch_export import write_torch_csv
from resihp.ir.torch_rows import CsvKind

V_SHAPED = (
    "0UNSHARD,3UNSHARD,0F0,0SEND_F0,3RECV_F0,3F0,(0F1;3B0)OVERLAP_F_B,0SEND_F1,3SEND_B0\r\n"
    "1RECV_F0,1F0,2F0,2SEND_F0,1RECV_F1,2RECV_B0,1F1,2I0,1I0,1W0,2W0,1REDUCE_GRAD,2REDUCE_GRAD\r\n"
)


def changed(plan, **fields):
    """The plan with other fields."""
    return msgspec.structs.replace(plan, **fields)


def with_instruction(plan, instr, at=0, stream=0):
    """The plan with one more instruction in a stream."""
    streams = list(plan.streams)
    body = streams[stream].body
    streams[stream] = changed(streams[stream], body=(*body[:at], instr, *body[at:]))
    return changed(plan, streams=tuple(streams))


def refusal(plan, kind: CsvKind = "comms"):
    """Why the plan cannot be written."""
    with pytest.raises(UserError) as caught:
        write_torch_csv(plan, kind)
    return str(caught.value)


def test_a_plan_is_written_as_its_actions():
    """1F1B of two stages, with transfers; `step` is what torch does anyway."""
    assert write_torch_csv(make_plan(microbatches=2), "comms") == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\r\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD\r\n"
    )


def test_what_was_read_is_written_to_the_byte():
    """Stages, pairs, parameters and the bottom of a V."""
    assert write_torch_csv(read_torch_csv(V_SHAPED).plan, "comms") == V_SHAPED


def test_the_order_of_computing_can_be_written_of_a_plan():
    """Everything else is left out."""
    assert write_torch_csv(read_torch_csv(V_SHAPED).plan, "compute") == (
        "0F0,3F0,(0F1;3B0)OVERLAP_F_B\r\n1F0,2F0,1F1,2I0,1I0,1W0,2W0\r\n"
    )


def test_a_schedule_has_no_communication_to_write():
    """It is lowered first."""
    schedule = read_torch_csv("0F0,0B0\n1F0,1B0\n").plan
    assert write_torch_csv(schedule, "compute") == "0F0,0B0\r\n1F0,1B0\r\n"
    assert "`resihp lower` adds it" in refusal(schedule)


def test_rows_follow_ranks_whatever_the_order_of_the_streams():
    """Row k is rank k."""
    plan = make_plan(microbatches=2)
    turned = changed(plan, streams=plan.streams[::-1], groups=plan.groups[::-1])
    assert write_torch_csv(turned, "comms") == write_torch_csv(plan, "comms")


PLAN = make_plan()
RESUMED = changed(PLAN, resume=Resume(step=7))
LOADED = changed(PLAN, reconfigure=(Load(layers=LayerRange(0, 3), step=7, target=GroupName(0, 0)),))
TURNED = changed(
    PLAN,
    groups=tuple(changed(group, ranks=(1 - group.pp,)) for group in PLAN.groups),
)


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        (make_plan(dp=2), "2 replicas (`dp=2`)"),
        (make_plan(tp=2), "group dp0.pp0 has TP degree 2"),
        (TURNED, "group dp0.pp0 is rank 1; row k is rank k"),
        (changed(PLAN, standby=(2,)), "a `standby` rank (2)"),
        (changed(PLAN, lost=(2,)), "a `lost` rank (2)"),
        (RESUMED, "`resume step=7`"),
        (LOADED, "a `reconfigure` block"),
        (changed(PLAN, memory_bytes=1 << 30), "the `memory` line"),
        (changed(PLAN, transport="pair"), "`transport pair`"),
        (changed(PLAN, groups=PLAN.groups[:1]), "there is no group dp0.pp1"),
        (changed(PLAN, streams=PLAN.streams[:1]), "dp0.pp1 has 0 streams"),
        (changed(PLAN, streams=PLAN.streams * 2), "dp0.pp0 has 2 streams"),
        (with_instruction(PLAN, Instr(Op.SCATTER_ACT, 0)), "`scatter_act 0` of dp0.pp0"),
        (with_instruction(PLAN, Instr(Op.F, 0, home=1)), "a micro-batch of replica 1"),
        (with_instruction(PLAN, Instr(Op.SEND_ACT, 0, peer=1)), "a peer in replica 1"),
        (with_instruction(PLAN, Instr(Op.STEP)), "torch steps at the end"),
        (with_instruction(PLAN, Instr(Op.F, 0, stage=1)), "names no stage that stands there"),
        (with_instruction(PLAN, Instr(Op.SEND_ACT, 0, paired=True)), "is overlapped"),
    ],
)
def test_what_torch_cannot_say_is_refused_by_name(plan, named):
    """The first of such things, as it reads in the plan."""
    assert refusal(plan).startswith("torch's CSV cannot say this: ")
    assert named in refusal(plan)
    assert named in refusal(plan, "compute")


def test_home_and_peer_that_say_the_default_can_be_written():
    """They mean nothing else."""
    plan = make_plan(microbatches=2)
    streams = tuple(
        changed(
            stream,
            body=tuple(
                changed(
                    instr,
                    home=None if instr.microbatch is None else 0,
                    peer=0 if instr.op.is_transfer else None,
                )
                for instr in stream.body
            ),
        )
        for stream in plan.streams
    )
    said = changed(plan, streams=streams)
    assert write_torch_csv(said, "comms") == write_torch_csv(plan, "comms")


def test_a_huge_mesh_is_refused_at_once():
    """A plan is untrusted, verified or not."""
    assert "there is no group dp0.pp2" in refusal(
        changed(PLAN, mesh=changed(PLAN.mesh, pp=10**9), level=Level.PLAN)
    )
