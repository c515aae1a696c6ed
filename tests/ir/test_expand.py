"""Expansion of plans of any shape against an account made from who runs what."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_build import make_plan
from staged_plans import Staged, random_staged

from resihp.errors import UserError
from resihp.ir.expand import expand
from resihp.ir.model import Instr, Level, Op, Plan
from resihp.ir.program import Program, TensorType

seeds = st.integers(0, 10**6).map(random.Random)


def messages(plan: Plan, op: Op) -> list[tuple]:
    """(from, to, stage that made it, home, micro-batch, chunk, chunks, tokens), as `op` has it."""
    found = []
    sends = op in (Op.SEND_ACT, Op.SEND_GRAD)
    step = 1 if op in (Op.SEND_ACT, Op.RECV_ACT) else -1
    for rank in plan.active_ranks:
        for instr in expand(plan, rank).instrs:
            if instr.op is op:
                assert instr.stage is not None
                assert instr.tensor is not None
                for peer, chunk, num_chunks in instr.transfers:
                    ends = (rank, peer) if sends else (peer, rank)
                    made = instr.stage if sends else instr.stage - step
                    tokens = instr.tensor.tokens
                    what = (made, instr.home, instr.microbatch, chunk, num_chunks, tokens)
                    found.append((*ends, *what))
    return sorted(found)


def must_cross(staged: Staged, step: int) -> list[tuple]:
    """The same, from who runs what."""
    plan, positions, owners, scatter = staged
    found = []
    for stage, home, number in owners:
        if not 0 <= stage + step < len(positions):
            continue
        ends = [plan.group(owners[at, home, number], positions[at]) for at in (stage, stage + step)]
        source, target = ends
        assert source is not None
        assert target is not None
        if source.name == target.name:
            continue
        num = max(source.tp, target.tp)
        pairs = [(c * source.tp // num, c * target.tp // num, c) for c in range(num)]
        if source.tp == target.tp and not scatter:
            num, pairs = 1, [(member, member, 0) for member in range(source.tp)]
        found += [
            (source.ranks[i], target.ranks[j], stage, home, number, chunk, num, 16 // num)
            for i, j, chunk in pairs
        ]
    return sorted(found)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_programs_send_and_receive_exactly_what_must_cross(rng: random.Random):
    """Every chunk of every tensor between groups, from its member to its member, at both ends."""
    staged = random_staged(rng)
    for send, recv, step in ((Op.SEND_ACT, Op.RECV_ACT, 1), (Op.SEND_GRAD, Op.RECV_GRAD, -1)):
        expected = must_cross(staged, step)
        assert messages(staged.plan, send) == expected
        assert messages(staged.plan, recv) == expected


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_programs_keep_the_order_and_name_every_stage(rng: random.Random):
    """Members run their group's stream; the stage of each instruction is a number."""
    plan = random_staged(rng).plan
    for group in plan.groups:
        stream = next(s for s in plan.streams if (s.replicas[0], s.pp) == group.name)
        for index, rank in enumerate(group.ranks):
            program = expand(plan, rank)
            assert (program.group, program.tp_index, program.tp) == (group.name, index, group.tp)
            assert [i.op for i in program.instrs] == [i.op for i in stream.body]
            assert all(
                instr.stage in program.stages for instr in program.instrs if instr.op.has_stage
            )


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_a_program_survives_the_wire(rng: random.Random):
    """MessagePack gives it back."""
    plan = random_staged(rng).plan
    program = expand(plan, plan.active_ranks[0])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(program), type=Program) == program


def test_a_schedule_has_no_programs():
    """Nobody sends anything in it yet."""
    plan = msgspec.structs.replace(make_plan(), level=Level.SCHEDULE)
    with pytest.raises(UserError, match="`resihp lower` makes it a plan"):
        expand(plan, 0)


@pytest.mark.parametrize(
    ("instr", "reason"),
    [
        (Instr(Op.SEND_ACT, 0, peer=7), "send_act 0 in dp0.pp0 has no group at its other end"),
        (Instr(Op.SEND_GRAD, 0), "send_grad 0 in dp0.pp0 has no group at its other end"),
        (Instr(Op.F, 0, stage=1), "F 0 in dp0.pp0 names no stage that is there"),
    ],
)
def test_what_cannot_be_resolved_is_refused(instr: Instr, reason: str):
    """The verifier says more; expansion only never guesses."""
    plan = make_plan()
    first = msgspec.structs.replace(plan.streams[0], body=(instr,))
    plan = msgspec.structs.replace(plan, streams=(first, *plan.streams[1:]))
    with pytest.raises(UserError, match=reason):
        expand(plan, 0)


def test_a_tensor_type_knows_its_size():
    """Spelled as tokens, hidden size and element type."""
    whole = TensorType(128, 256)
    assert (str(whole), whole.num_bytes) == ("128x256xf32", 128 * 256 * 4)
