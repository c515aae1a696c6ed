"""The interpreter: verified plans run, each computation gets its own tensors, all waits end."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest
from staged_plans import random_staged
from symbolic import (
    FAR_S,
    POOL,
    Part,
    Switch,
    SwitchWire,
    SymbolicWork,
    Tensor,
    parts_of,
    programs_of,
    run_all,
)

from resihp.compiler import initial_plan
from resihp.errors import CommError, GenerationClosed, PeerLost
from resihp.executor.device.interface import Tag
from resihp.executor.interpreter.run import Interpreter
from resihp.executor.stream import Event
from resihp.ir.model import Batch, GroupName, LayerRange, Mesh, ModelShape, Op, Plan
from resihp.ir.program import Program, ProgramInstr, TensorType, Transfer

SHAPE = ModelShape(name="tiny", layers=8, hidden=64, heads=4, kv_heads=4, ffn=96, vocab=128)
TYPE = TensorType(16, 64)


def plan_of(schedule: str, mesh: Mesh, num_microbatches: int = 4) -> Plan:
    batch = Batch(microbatches=num_microbatches, tokens=16)
    return initial_plan(SHAPE, mesh, batch, schedule=schedule, memory_bytes=None)


def check_complete(parts: list[Part]) -> None:
    """Each rank ran exactly its program's work and ended with the update."""
    for part in parts:
        program, work = part.interpreter.program, part.work
        expected = [
            (what, instr.stage, (instr.home, instr.microbatch))
            for instr in program.instrs
            if instr.op.is_compute
            for what in ("BW" if instr.op is Op.BW else instr.op.mnemonic)
        ]
        assert work.log == expected
        assert work.ends[-2:] == ["vote", "apply"]


# --- whole plans


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(40))
async def test_random_plans_run_to_their_end(seed: int):
    """Several stages anywhere, migrated work, unequal degrees, missing positions."""
    staged = random_staged(random.Random(seed))
    parts = parts_of(programs_of(staged.plan))
    for step in range(2):
        records = await run_all(parts, step)
        assert [record.step for record in records] == [step] * len(parts)
        check_complete(parts)


@pytest.mark.asyncio
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "looped-bfs", "zbv"]
)
async def test_every_schedule_runs(schedule: str, tp: int):
    """Interleaved ones send two stages' tensors between the same ranks; V hands over in place."""
    parts = parts_of(programs_of(plan_of(schedule, Mesh(tp=tp, pp=2, dp=2))))
    await run_all(parts)
    check_complete(parts)


@pytest.mark.asyncio
async def test_nothing_is_sent_between_stages_of_one_rank():
    """The turn of a V: its tensors cross no wire, though both stages do."""
    parts = parts_of(programs_of(plan_of("zbv", Mesh(tp=1, pp=2, dp=1), num_microbatches=3)))
    await run_all(parts)
    # Of three boundaries one is inside the last rank; both others are crossed both ways.
    assert [part.wire.num_sent for part in parts] == [2 * 3, 2 * 3]


@pytest.mark.asyncio
async def test_tensors_go_when_their_last_user_has_had_them():
    """Run-ahead holds no results: what is handed on belongs to the next one alone."""
    program = programs_of(plan_of("zbv", Mesh(tp=1, pp=1, dp=1), num_microbatches=8))[0]
    (part,) = parts_of([program])
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def made(tensor: Tensor) -> None:
        nonlocal most
        alive.add(tensor)
        most = max(most, len(alive))

    part.work.made = made
    await run_all([part])
    assert not alive
    assert most <= 3 + _most_waiting(program), most


def _most_waiting(program: Program) -> int:
    """Tensors made and not used yet, at the worst moment of the program's order."""
    waiting, most = set[tuple[Op, int, int]](), 0
    last = program.num_stages - 1
    for instr in program.instrs:
        stage, number = instr.stage, instr.microbatch
        if stage is None or number is None:
            continue
        op = Op.F if instr.op is Op.F else Op.B
        if instr.op is Op.W:
            continue
        waiting.discard((op, stage, number))
        far = stage + 1 if op is Op.F else stage - 1
        if 0 <= far <= last:
            waiting.add((op, far, number))
        most = max(most, len(waiting))
    return most


# --- one rank, fed by hand


def instr(op: Op, number: int, peer: int | None = None, **more: object) -> ProgramInstr:
    """Of micro-batch `number` at stage 1 of 2; `peer` for sends and receives."""
    transfers = () if peer is None else (Transfer(peer, 0, 1),)
    tensor = None if peer is None else TYPE
    return ProgramInstr(
        op=op,
        microbatch=number,
        home=0,
        stage=1,
        transfers=transfers,
        tensor=tensor,
        **more,  # type: ignore[arg-type]
    )


def last_stage(*instrs: ProgramInstr) -> Program:
    """A program of the second of two stages, rank 1; rank 0 is its peer."""
    return Program(
        model=SHAPE,
        mesh=Mesh(tp=1, pp=2, dp=1),
        batch=Batch(microbatches=2, tokens=16),
        rank=1,
        group=GroupName(0, 1),
        tp_index=0,
        tp=1,
        layers=(LayerRange(4, 7),),
        stages=(1,),
        num_stages=2,
        instrs=(
            *instrs,
            ProgramInstr(op=Op.REDUCE_GRADS, stage=1),
            ProgramInstr(op=Op.STEP),
        ),
    )


TWO = last_stage(
    instr(Op.RECV_ACT, 0, 0),
    instr(Op.RECV_ACT, 1, 0),
    instr(Op.F, 0),
    instr(Op.F, 1),
    instr(Op.BW, 0),
    instr(Op.SEND_GRAD, 0, 0),
    instr(Op.BW, 1),
    instr(Op.SEND_GRAD, 1, 0),
)
PAIRED = last_stage(
    instr(Op.RECV_ACT, 0, 0),
    instr(Op.RECV_ACT, 1, 0),
    instr(Op.F, 0, paired=True),
    instr(Op.F, 1),
    instr(Op.BW, 0),
    instr(Op.BW, 1),
)


def deliver(part: Part, number: int, step: int = 0) -> None:
    """The activation of micro-batch `number` arrives from rank 0."""
    tag = Tag(int(Op.SEND_ACT), step, 0, 0, number, 0)
    tensor = Tensor("act", step, 0, (0, number))
    part.wire.switch.event(0, 1, tag).set(part.work.chunk(tensor, 0, 1))


def event_of(part: Part, number: int, step: int = 0) -> Event:
    return part.wire.received[Tag(int(Op.SEND_ACT), step, 0, 0, number, 0)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(FAR_S):
        while not condition():
            await asyncio.sleep(0)


def begun(part: Part, step: int = 0) -> asyncio.Task[object]:
    run: Coroutine[object, object, object] = part.interpreter.run(step)
    return asyncio.create_task(run)


async def ended(running: asyncio.Task[object]) -> object:
    async with asyncio.timeout(FAR_S):
        (result,) = await asyncio.gather(running, return_exceptions=True)
    return result


async def settle(part: Part) -> None:
    """What a session does when its generation is over."""
    for stream in part.streams:
        stream.cancel()
    for event in part.wire.received.values():
        event.fail(GenerationClosed("over"))
    for stream in part.streams:
        await stream.when_idle().wait_async()
    part.interpreter.discard()
    for stream in part.streams:
        stream.reset()


@pytest.mark.asyncio
async def test_a_rank_says_which_receive_it_waits_for():
    """By index into its program, of the instruction that uses it and of the receive."""
    (part,) = parts_of([TWO])
    running = begun(part)
    deliver(part, 0)
    await until(lambda: part.interpreter.where().receives == (1,))
    assert part.interpreter.where().compute == 3  # F 1
    deliver(part, 1)
    assert not isinstance(await ended(running), BaseException)
    await until(lambda: part.interpreter.where()[1:4] == (-1, -1, ()))


@pytest.mark.asyncio
async def test_a_pair_starts_when_the_inputs_of_both_are_there():
    """Then one runs after the other, in the order of the program; what lacks is told of both."""
    (part,) = parts_of([PAIRED])
    running = begun(part)
    await until(lambda: part.interpreter.where().receives == (0, 1))
    deliver(part, 0)
    await until(lambda: part.streams[0].is_waiting and part.interpreter.where().receives == (1,))
    assert part.streams[0].position == 2
    assert not part.work.log
    deliver(part, 1)
    assert not isinstance(await ended(running), BaseException)
    assert part.work.log[:2] == [("F", 1, (0, 0)), ("F", 1, (0, 1))]


@pytest.mark.asyncio
async def test_instructions_are_observed():
    """Start and end of each on one clock, computations one after the other."""
    (part,) = parts_of([TWO])
    for step in range(3):
        running = begun(part, step)
        deliver(part, 0, step)
        deliver(part, 1, step)
        assert not isinstance(await ended(running), BaseException)
        seen = part.interpreter.observation
        assert seen.step == step
        computed = [i for i, each in enumerate(TWO.instrs) if each.op.is_compute]
        for index in range(len(TWO.instrs)):
            assert 0 < seen.starts_ns[index] <= seen.ends_ns[index], TWO.instrs[index]
        for before, after in pairwise(computed):
            assert seen.ends_ns[before] <= seen.starts_ns[after]
        assert seen.ends_ns[0] <= seen.starts_ns[2]


@pytest.mark.asyncio
async def test_the_first_error_ends_the_iteration_at_once():
    """Though another message is still waited for, and would never come."""
    (part,) = parts_of([TWO])
    running = begun(part)
    await until(lambda: len(part.wire.received) == 2)
    lost = PeerLost("rank 0 is gone")
    event_of(part, 1).fail(lost)
    assert await ended(running) is lost
    await settle(part)


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["forward", "backward_weight", "reduce", "vote", "apply"])
async def test_an_error_of_work_is_what_the_run_raises(method: str):
    """On either stream, with everything behind it dropped on both."""
    error = CommError(method)

    def broken(*_: object) -> None:
        raise error

    kind = type("Broken", (SymbolicWork,), {method: broken})
    (part,) = parts_of([TWO], kind)
    running = begun(part)
    deliver(part, 0)
    deliver(part, 1)
    assert await ended(running) is error
    assert part.streams[0].submit(lambda: None).error is error
    assert part.streams[1].submit(lambda: None).error is error
    await settle(part)


@pytest.mark.asyncio
async def test_a_cancelled_iteration_ends_as_a_closed_generation():
    """Wherever it stands; the same rank then runs the next generation."""
    for num_delivered in range(3):
        (part,) = parts_of([TWO])
        running = begun(part, step=5)
        for number in range(num_delivered):
            deliver(part, number, step=5)
        if num_delivered == 1:
            await until(lambda part=part: part.interpreter.where().receives == (1,))
        else:
            await asyncio.sleep(0)
        await settle(part)
        result = await ended(running)
        assert num_delivered == 2 or isinstance(result, GenerationClosed)
        assert part.work.num_discards == 1
        (again,) = parts_of([TWO])
        running = begun(again, step=5)
        deliver(again, 0, step=5)
        deliver(again, 1, step=5)
        assert not isinstance(await ended(running), BaseException)


@pytest.mark.asyncio
async def test_what_ends_late_disturbs_no_later_iteration():
    """A message that was lost after its iteration had ended breaks nothing."""
    sent: list[Event] = []

    class SlowWire(SwitchWire):
        def send(
            self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
        ) -> Event:
            sent.append(Event())
            return sent[-1]

    compute, comm = POOL.take(1)[0]
    work, wire = SymbolicWork(TWO), SlowWire(Switch(), 1)
    interpreter = Interpreter(TWO, work, compute=compute, comm=comm, wire=wire)
    part = Part(interpreter, work, wire, (compute, comm))
    for step in range(2):
        running = begun(part, step)
        deliver(part, 0, step)
        deliver(part, 1, step)
        if step == 1:
            await until(lambda: len(sent) == 4)
            sent[0].fail(PeerLost("late"))
        assert not isinstance(await ended(running), BaseException)


@pytest.mark.asyncio
async def test_nothing_keeps_an_interpreter_that_was_discarded():
    """The streams outlive it; its tensors must not."""
    (part,) = parts_of([TWO])
    running = begun(part)
    wire = part.wire
    await until(lambda: len(wire.received) == 2)
    await settle(part)
    await ended(running)
    here = weakref.ref(part.interpreter)
    del part, running
    wire.received.clear()
    wire.switch.events.clear()
    await asyncio.sleep(0)  # the loop itself holds what it woke us with
    gc.collect()
    assert here() is None


@pytest.mark.asyncio
async def test_an_injected_fault_runs_right_before_its_instruction():
    """On the stream of that instruction, after all that comes before it there."""
    for index, before in ((3, ["F"]), (8, ["F", "F", "B", "W", "B", "W"])):
        compute, comm = POOL.take(1)[0]
        work, wire = SymbolicWork(TWO), SwitchWire(Switch(), 1)
        seen: list[list[str]] = []

        def fault(work: SymbolicWork = work, seen: list[list[str]] = seen) -> None:
            seen.append([what for what, _, _ in work.log])

        interpreter = Interpreter(
            TWO,
            work,
            compute=compute,
            comm=comm,
            wire=wire,
            before=lambda step, at, index=index, fault=fault: (
                fault if (step, at) == (1, index) else None
            ),
        )
        part = Part(interpreter, work, wire, (compute, comm))
        for step in range(2):
            running = begun(part, step)
            deliver(part, 0, step)
            deliver(part, 1, step)
            assert not isinstance(await ended(running), BaseException)
        assert seen == [before]
