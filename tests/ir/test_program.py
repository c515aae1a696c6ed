"""Expansion to one rank, timeline, memory and picture."""

from __future__ import annotations

import itertools

import plan_oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_build import make_plan

from resihp.errors import UserError
from resihp.ir.expand import chunk_routes, expand
from resihp.ir.facts import Facts, StageFacts
from resihp.ir.lanes import lanes_of
from resihp.ir.model import GroupName, Op, Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.program import Transfer
from resihp.ir.show import draw
from resihp.ir.timeline import play
from resihp.ir.verify import verify
from resihp.ir.verify.memory import live_spans


def messages(plan: Plan, send: Op, recv: Op) -> tuple[list, list]:
    """All (from, to, home, micro-batch, chunk, chunks) as the senders and the receivers say."""
    sent, received = [], []
    for rank in plan.active_ranks:
        for instr in expand(plan, rank).instrs:
            for peer, chunk, num_chunks in instr.transfers:
                what = (instr.home, instr.microbatch, chunk, num_chunks)
                if instr.op is send:
                    sent.append((rank, peer, *what))
                elif instr.op is recv:
                    received.append((peer, rank, *what))
    return sent, received


@pytest.mark.parametrize("degrees", list(itertools.product((1, 2, 4), repeat=2)))
@pytest.mark.parametrize("ops", [(Op.SEND_ACT, Op.RECV_ACT), (Op.SEND_GRAD, Op.RECV_GRAD)])
@pytest.mark.parametrize("scatter", [False, True])
def test_both_ends_of_every_message_agree(degrees, ops, scatter):
    """What one rank sends is what its peer receives, each chunk once."""
    by_name = {GroupName(0, stage): degree for stage, degree in enumerate(degrees)}
    plan = make_plan(tp=4, degrees=by_name, scatter=scatter)
    sent, received = messages(plan, *ops)
    assert sorted(sent) == sorted(received)
    assert len(set(sent)) == len(sent) == plan.batch.microbatches * max(degrees)


def test_messages_of_a_rank_pair_are_in_the_same_order():
    """Per directed pair the receiver lists what the sender lists, in order."""
    plan = make_plan(pp=3, tp=4, microbatches=5, degrees={GroupName(0, 1): 2})
    for ops in ((Op.SEND_ACT, Op.RECV_ACT), (Op.SEND_GRAD, Op.RECV_GRAD)):
        sent, received = messages(plan, *ops)
        for pair in {message[:2] for message in sent}:
            assert [m for m in sent if m[:2] == pair] == [m for m in received if m[:2] == pair]


def test_a_program_resolves_peers_chunks_and_homes():
    """TP 1 -> 2: the only member of the sender has both chunks."""
    plan = make_plan(pp=2, dp=2, tp=2, degrees={GroupName(0, 0): 1}, gone={1: 0})
    program = expand(plan, 0)
    assert (program.group, program.tp, program.tp_index) == (GroupName(0, 0), 1, 0)
    assert (program.layers, program.stages, program.num_stages) == (((0, 3),), (0,), 2)
    send = next(i for i in program.instrs if i.op is Op.SEND_ACT and i.home == 1)
    assert send.transfers == (Transfer(2, 0, 2), Transfer(3, 1, 2))
    scatter = next(i for i in program.instrs if i.op is Op.SCATTER_ACT)
    assert (scatter.transfers, scatter.num_chunks) == ((), 2)
    assert program.instrs[-1].op is Op.STEP
    assert program.instrs[-1].home is None


def test_a_rank_without_a_group_has_no_program():
    """Standby and lost ranks run nothing."""
    plan = make_plan(dp=2, gone={1: 0})
    with pytest.raises(UserError, match="rank 3 is in no group of this plan"):
        expand(plan, 3)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_chunk_routes_spread_evenly(sender_tp, receiver_tp):
    """Each member sends, and receives, the same number of chunks."""
    routes = chunk_routes(sender_tp, receiver_tp)
    assert len(routes) == max(sender_tp, receiver_tp)
    for members, degree in ((0, sender_tp), (1, receiver_tp)):
        counts = [sum(route[members] == member for route in routes) for member in range(degree)]
        assert counts == [len(routes) // degree] * degree


def test_times_of_1f1b_are_the_known_ones():
    """Two stages, BW costs 2: the bubble is (pp - 1) * (F + BW)."""
    for pp, microbatches in itertools.product((1, 2, 4), (4, 8)):
        plan = make_plan(pp=pp, microbatches=microbatches)
        timeline = play(lanes_of(plan))
        assert timeline.makespan == (microbatches + pp - 1) * 3
        assert timeline.stuck == {}


def test_every_instruction_respects_its_dependencies():
    """Starts follow program order, sends precede uses, rendezvous start together."""
    plan = make_plan(pp=3, dp=2, microbatches=4, split=True)
    lanes = lanes_of(plan)
    timeline = play(lanes)
    steps = set()
    for name, lane in lanes.items():
        starts, ends = timeline.starts[name], timeline.ends[name]
        assert all(ends[i] <= starts[i + 1] for i in range(len(ends) - 1))
        for index, instr in enumerate(lane.body):
            if instr.op is Op.F and name.pp:
                up = lanes[GroupName(name.replica, name.pp - 1)]
                sent = up.body.index(type(instr)(Op.SEND_ACT, instr.microbatch))
                assert timeline.ends[up.name][sent] <= starts[index]
        steps.add(starts[-1])
    assert len(steps) == 1


sizes = st.integers(0, 1000)


@given(
    state_bytes=sizes, activation=sizes, released=sizes, grads=sizes, boundary=sizes,
    pp=st.integers(1, 4), microbatches=st.integers(1, 6), split=st.booleans(),
    order=st.sampled_from(["1f1b", "gpipe"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_peak_memory_without_send_buffers_is_that_of_a_ledger(
    state_bytes, activation, released, grads, boundary, pp, microbatches, split, order
):
    """Summing lives gives what taking and giving back instruction by instruction gives."""
    plan = make_plan(pp=pp, microbatches=microbatches, split=split, order=order)
    facts = StageFacts(
        state_bytes=state_bytes,
        activation_bytes=activation + released,
        released_by_b_bytes=released,
        weight_input_grad_bytes=grads,
        boundary_bytes=boundary,
    )
    lanes = lanes_of(plan)
    spans = live_spans(lanes, Facts(stages=dict.fromkeys(lanes, (facts,))))
    for name, lane in lanes.items():
        lives = [x for x in spans[name] if x.what != "posted sends"]
        totals = [
            state_bytes + sum(x.num_bytes for x in lives if x.first <= at <= x.last)
            for at in range(len(lane.body))
        ]
        assert max(totals) == plan_oracle.peak_bytes(plan, name, facts)


def test_a_posted_send_is_held_until_an_answer_proves_its_arrival():
    """1F1B: an activation until its gradient comes back; the last gradients to the end."""
    plan = make_plan(pp=2, microbatches=3)
    lanes = lanes_of(plan)
    facts = StageFacts(
        state_bytes=0,
        activation_bytes=0,
        released_by_b_bytes=0,
        weight_input_grad_bytes=0,
        boundary_bytes=1,
    )

    spans = live_spans(lanes, Facts(stages=dict.fromkeys(lanes, (facts,))))

    def held(stage: int) -> list[tuple[str, int]]:
        lane = lanes[GroupName(0, stage)]
        return [
            (f"{lane.body[x.first].op.mnemonic} {x.number}", x.last)
            for x in spans[lane.name]
            if x.what == "posted sends"
        ]

    first, last = (lanes[GroupName(0, stage)].body for stage in (0, 1))
    answers = {i.microbatch: at for at, i in enumerate(first) if i.op is Op.RECV_GRAD}
    assert held(0) == [(f"send_act {number}", answers[number]) for number in range(3)]
    # Stage 0 uses gradient 0 before it sends activation 2.
    second = [at for at, i in enumerate(last) if i.op is Op.RECV_ACT][2]
    end = len(last) - 1
    assert held(1) == [("send_grad 0", second), ("send_grad 1", end), ("send_grad 2", end)]


def test_the_capacity_is_met_exactly():
    """The peak itself fits; one byte less does not."""
    facts = StageFacts(
        state_bytes=10,
        activation_bytes=5,
        released_by_b_bytes=3,
        weight_input_grad_bytes=1,
        boundary_bytes=0,
    )
    peak = max(
        plan_oracle.peak_bytes(make_plan(), GroupName(0, stage), facts) for stage in range(2)
    )
    for capacity, expected in ((peak, []), (peak - 1, ["RHP601"])):
        plan = make_plan(memory_bytes=capacity)
        known = Facts(stages=dict.fromkeys([g.name for g in plan.groups], (facts,)))
        found = verify(parse(print_plan(plan)), facts=known)
        assert [finding.code for finding in found][:1] == expected


PICTURE = """\
tiny: tp=2 pp=2 dp=2, 4 micro-batches per replica; 7 of 8 ranks compute; 15 units of time

              idle  0              5              10
dp0.pp0        20%  F0 F1 .  .  X0 X0 F2 X1 X1 F3 X2 X2 .  X3 X3
dp0,1.pp1      20%  .  F0 X0 X0 F1 X1 X1 F2 X2 X2 F3 X3 X3 .  .
dp1.pp0 tp=1   20%  F0 F1 .  .  X0 X0 F2 X1 X1 F3 X2 X2 .  X3 X3

F forward   X both gradients (BW)   . idle
units of time: F 1, BW 2; transfers 0
tp=N: a TP degree other than the mesh's 2
standby: 5
"""


def test_the_picture_shows_order_idleness_and_unequal_tp():
    """Rows of replicas that do the same are drawn once."""
    plan = make_plan(pp=2, dp=2, tp=2, degrees={GroupName(1, 0): 1})
    assert draw(plan) == PICTURE


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_picture_keeps_to_the_width(width):
    """Long times are broken into bands."""
    plan = make_plan(pp=4, dp=3, microbatches=8, gone={1: 0})
    picture = draw(plan, width=width)
    rows = [line for line in picture.split("\n") if line.startswith(("dp", " "))]
    assert all(len(line) <= width for line in rows)
    assert "F7'1" in picture
    assert "lost: 4..7" in picture


def test_the_picture_of_a_deadlock_says_so():
    """It is drawn as far as it gets."""
    text = print_plan(make_plan(microbatches=1)).replace(
        "  send_act 0\n  recv_grad 0\n  BW 0\n", "  recv_grad 0\n  BW 0\n  send_act 0\n"
    )
    picture = draw(parse(text).plan)
    assert "deadlock: dp0.pp0 at `BW`, dp0.pp1 at `F` wait for ever" in picture
