"""One change to one program of a job: a dropped line, a wrong peer, another chunk, …"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from resihp.ir.model import Op
from resihp.ir.program import Program, ProgramInstr, TensorType, Transfer

__all__ = ["MUTATIONS", "mutate_programs"]

Mutation = Callable[[random.Random, list[ProgramInstr], int], None]


def mutate_programs(
    rng: random.Random, programs: Sequence[Program], mutation: Mutation
) -> list[Program] | None:
    """The programs with one of them changed; None where the mutation finds nothing to change."""
    at = rng.randrange(len(programs))
    program = programs[at]
    instrs = list(program.instrs)
    indices = [i for i, instr in enumerate(instrs) if _concerns(mutation, instr)]
    if not indices:
        return None
    mutation(rng, instrs, rng.choice(indices))
    instrs = [
        replace(instr, paired=False) if instr.paired and not _can_pair(instrs[i : i + 2]) else instr
        for i, instr in enumerate(instrs)
    ]
    changed = replace(program, instrs=tuple(instrs))
    if changed == program:
        return None
    return [*programs[:at], changed, *programs[at + 1 :]]


def _can_pair(instrs: list[ProgramInstr]) -> bool:
    """Whether two instructions can be written as a pair."""
    return len(instrs) == 2 and all(i.op.is_compute for i in instrs) and not instrs[1].paired


def _concerns(mutation: Mutation, instr: ProgramInstr) -> bool:
    if mutation in _OF_MESSAGES:
        return bool(instr.transfers)
    if mutation in (micro_batch, home):
        return instr.microbatch is not None
    return mutation is not operation or instr.op.is_compute


def drop(_: random.Random, instrs: list[ProgramInstr], at: int) -> None:
    del instrs[at]


def double(rng: random.Random, instrs: list[ProgramInstr], at: int) -> None:
    instrs.insert(rng.randint(0, len(instrs)), replace(instrs[at], paired=False))


def swap(_: random.Random, instrs: list[ProgramInstr], at: int) -> None:
    other = at + 1 if at + 1 < len(instrs) else at - 1
    instrs[at], instrs[other] = instrs[other], instrs[at]


def move(rng: random.Random, instrs: list[ProgramInstr], at: int) -> None:
    instr = instrs.pop(at)
    instrs.insert(rng.randint(0, len(instrs)), instr)


def micro_batch(rng: random.Random, instrs: list[ProgramInstr], at: int) -> None:
    instrs[at] = replace(instrs[at], microbatch=rng.randrange(5))


def home(rng: random.Random, instrs: list[ProgramInstr], at: int) -> None:
    instrs[at] = replace(instrs[at], home=rng.randrange(4))


def operation(rng: random.Random, instrs: list[ProgramInstr], at: int) -> None:
    instrs[at] = replace(instrs[at], op=rng.choice((Op.F, Op.B, Op.W, Op.BW)))


def peer(rng: random.Random, instrs: list[ProgramInstr], at: int) -> None:
    _message(rng, instrs, at, lambda t: t._replace(peer=rng.randrange(12)))


def chunk(rng: random.Random, instrs: list[ProgramInstr], at: int) -> None:
    _message(rng, instrs, at, lambda t: t._replace(chunk=rng.randrange(5)))


def chunks(rng: random.Random, instrs: list[ProgramInstr], at: int) -> None:
    number = rng.choice((0, 1, 2, 3, 4, 8))
    transfers = tuple(t._replace(num_chunks=number) for t in instrs[at].transfers)
    instrs[at] = replace(instrs[at], transfers=transfers, num_chunks=number)


def drop_message(rng: random.Random, instrs: list[ProgramInstr], at: int) -> None:
    transfers = instrs[at].transfers
    if len(transfers) > 1:
        gone = rng.randrange(len(transfers))
        instrs[at] = replace(instrs[at], transfers=transfers[:gone] + transfers[gone + 1 :])


def tensor(rng: random.Random, instrs: list[ProgramInstr], at: int) -> None:
    other = TensorType(rng.choice((4, 8, 16)), rng.choice((32, 64)))
    instrs[at] = replace(instrs[at], tensor=other)


def _message(
    rng: random.Random,
    instrs: list[ProgramInstr],
    at: int,
    change: Callable[[Transfer], Transfer],
) -> None:
    transfers = list(instrs[at].transfers)
    which = rng.randrange(len(transfers))
    transfers[which] = change(transfers[which])
    instrs[at] = replace(instrs[at], transfers=tuple(transfers), num_chunks=transfers[0].num_chunks)


_OF_MESSAGES = (peer, chunk, chunks, drop_message, tensor)
MUTATIONS: tuple[Mutation, ...] = (
    drop,
    double,
    swap,
    move,
    micro_batch,
    home,
    operation,
    *_OF_MESSAGES,
)
