"""Programs travel as bytes, and run only where they belong."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import msgspec
import pytest
from layouts import SMALL, job_of
from staged_plans import random_staged

from resihp.compiler import initial_plan
from resihp.errors import FrameError
from resihp.executor.local_world import check_program
from resihp.ir.expand import expand
from resihp.ir.model import Batch, Mesh, Op
from resihp.ir.program import Program, Transfer
from resihp.ir.program_bytes import decode_program, encode_program

MESH = Mesh(tp=2, pp=2, dp=1)
JOB = job_of(MESH)
PLAN = initial_plan(
    SMALL.shape("small"),
    MESH,
    Batch(microbatches=2, tokens=64),
    schedule="zbv",
    memory_bytes=None,
)
PROGRAM = expand(PLAN, 1)
PEERS = range(4)


def changed(**fields: object) -> Program:
    return msgspec.structs.replace(PROGRAM, **fields)


def with_instr(op: Op, **fields: object) -> Program:
    """The first instruction of kind `op` changed."""
    instrs = list(PROGRAM.instrs)
    index = next(i for i, instr in enumerate(instrs) if instr.op is op)
    instrs[index] = msgspec.structs.replace(instrs[index], **fields)
    return changed(instrs=tuple(instrs))


def without(op: Op) -> Program:
    """The first instruction of kind `op` left out."""
    index = next(i for i, instr in enumerate(PROGRAM.instrs) if instr.op is op)
    return changed(instrs=PROGRAM.instrs[:index] + PROGRAM.instrs[index + 1 :])


@pytest.mark.parametrize("seed", range(10))
def test_programs_survive_their_bytes(seed: int):
    """Of any plan, for every rank; equal programs give equal bytes."""
    plan = random_staged(random.Random(seed)).plan
    for rank in plan.active_ranks:
        program = expand(plan, rank)
        assert decode_program(encode_program(program)) == program
        assert encode_program(expand(plan, rank)) == encode_program(program)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000 + b"\xc0",
        encode_program(PROGRAM)[:-1],
        msgspec.msgpack.encode({"rank": "one"}),
        msgspec.msgpack.encode(msgspec.to_builtins(PROGRAM) | {"version": 2}),
    ],
    ids=["nothing", "no MessagePack", "a bomb", "cut", "another schema", "another version"],
)
def test_other_bytes_are_refused(payload: bytes):
    """As a frame that must not be trusted."""
    with pytest.raises(FrameError):
        decode_program(payload)


def test_programs_of_the_compiler_run_here():
    """Every rank's own, with all ranks as peers."""
    for rank in PLAN.active_ranks:
        check_program(expand(PLAN, rank), JOB, rank, PEERS)


STEP = PROGRAM.instrs[-1]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: expand(PLAN, 0), "that of rank 0"),
        (lambda: changed(model=SMALL.shape("other")), None),
        (lambda: changed(mesh=Mesh(tp=2, pp=2, dp=2)), "its mesh is"),
        (lambda: changed(batch=Batch(microbatches=3, tokens=64)), "its batch is"),
        (lambda: changed(precision="bf16"), "it is in bf16"),
        (lambda: changed(tp_index=2), "member 2 of 2"),
        (lambda: changed(stages=(0, 9)), "stages [0, 9] of 4"),
        (lambda: changed(layers=PROGRAM.layers[::-1]), "after layer"),
        (lambda: changed(layers=PROGRAM.layers[:1]), "2 stages with 1 range"),
        (lambda: with_instr(Op.F, stage=1), "which is not here"),
        (lambda: with_instr(Op.F, microbatch=2), "micro-batch 2 of 2"),
        (lambda: with_instr(Op.F, home=1), "replica 1 of 1"),
        (lambda: with_instr(Op.SEND_ACT, transfers=(Transfer(1, 0, 1),)), "this rank itself"),
        (lambda: with_instr(Op.SEND_ACT, transfers=(Transfer(7, 0, 1),)), "rank 7, which is not"),
        (lambda: with_instr(Op.SEND_ACT, transfers=(Transfer(0, 1, 2),)), "chunk 1 of 2"),
        (lambda: with_instr(Op.SEND_ACT, transfers=()), "0 messages"),
        (lambda: with_instr(Op.RECV_ACT, num_chunks=0), "0 chunks"),
        (lambda: with_instr(Op.RECV_ACT, tensor=None), "is of None"),
        (lambda: without(Op.RECV_ACT), "nothing delivers"),
        (lambda: without(Op.F), "nothing delivers"),
        (lambda: without(Op.W), "without a weight gradient"),
        (lambda: without(Op.REDUCE_GRADS), "are reduced"),
        (lambda: changed(instrs=(*PROGRAM.instrs, STEP)), "only step"),
        (lambda: changed(instrs=PROGRAM.instrs[:-1]), "only step"),
        (lambda: changed(instrs=()), "are reduced"),
    ],
)
def test_what_does_not_belong_here_is_refused(make: Callable[[], Program], reason: str | None):
    """In words, before anything is computed; the name of the model says nothing."""
    if reason is None:
        check_program(make(), JOB, 1, PEERS)
        return
    with pytest.raises(FrameError, match="the program that came to rank 1") as caught:
        check_program(make(), JOB, 1, PEERS)
    assert reason in str(caught.value)


def test_any_change_of_the_order_is_refused_or_still_right():
    """Two neighbours swapped, everywhere: never a crash."""
    for index in range(len(PROGRAM.instrs) - 1):
        instrs = list(PROGRAM.instrs)
        instrs[index], instrs[index + 1] = instrs[index + 1], instrs[index]
        with contextlib.suppress(FrameError):
            check_program(changed(instrs=tuple(instrs)), JOB, 1, PEERS)
