"""Who waits for whom in a world in which nothing happens any more, in terms of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from resihp.executor.emulation.stream import EmulatedStream
from resihp.executor.emulation.world import EmulatedRank
from resihp.ir.circle import shortest_circle
from resihp.ir.program import Program
from resihp.ir.statements import spell_instr, spell_numbers

__all__ = ["Wait", "circle_of", "explain", "waits_of"]


class Wait(NamedTuple):
    """`rank` stands at an instruction that needs one of its own receives, or other ranks."""

    rank: int
    at: int
    """Index of the instruction."""
    receive: int | None
    """Index of the receive that has not come; None: the instruction is a rendezvous."""
    missing: tuple[int, ...]
    """The ranks that it waits for."""


def explain(ranks: Mapping[int, EmulatedRank]) -> str:
    """Why nothing can run: a shortest circle of ranks, each with what it waits for."""
    waits = [wait for rank in ranks.values() for wait in waits_of(rank)]
    if not waits:
        return "nothing can run, and no rank waits for another"
    circle = circle_of(waits)
    shown = circle or waits[:1]
    names = ", which waits for ".join(f"rank {wait.rank}" for wait in [*circle[1:], *circle[:1]])
    head = f"deadlock: rank {shown[0].rank} waits for {names}" if circle else "nobody can go on"
    num_stuck = len({wait.rank for wait in waits})
    lines = [f"  {_sentence(wait, ranks)}" for wait in shown]
    rest = f"  {num_stuck} of {len(ranks)} ranks wait for ever"
    return "\n".join([head, *lines, rest])


def waits_of(rank: EmulatedRank) -> Iterator[Wait]:
    """What the two streams of a rank wait for that others owe."""
    program, where = rank.program, rank.interpreter.where()
    for receive in where.receives:
        at = where.compute if rank.compute.is_waiting else where.comm
        peers = {transfer.peer for transfer in program.instrs[receive].transfers}
        yield Wait(program.rank, at, receive, tuple(sorted(peers)))
    for stream in (rank.compute, rank.comm):
        missing = _missing_members(stream)
        if missing:
            yield Wait(program.rank, stream.position, None, missing)


def _missing_members(stream: EmulatedStream) -> tuple[int, ...]:
    meeting = stream.meeting
    return () if meeting is None else tuple(sorted(meeting.missing))


def circle_of(waits: Sequence[Wait]) -> list[Wait]:
    """A shortest circle of waits; empty where there is none."""
    links: dict[int, set[int]] = {}
    for wait in waits:
        links.setdefault(wait.rank, set()).update(wait.missing)
    circle = shortest_circle({rank: sorted(others) for rank, others in links.items()})
    return [
        next(wait for wait in waits if wait.rank == rank and other in wait.missing)
        for rank, other in zip(circle, [*circle[1:], *circle[:1]], strict=True)
    ]


def _sentence(wait: Wait, ranks: Mapping[int, EmulatedRank]) -> str:
    program = ranks[wait.rank].program
    here = f"rank {wait.rank} of {program.group} waits at {_text(program, wait.at)}"
    whom = f"rank{'s' if len(wait.missing) > 1 else ''} {spell_numbers(wait.missing)}"
    if wait.receive is None:
        return f"{here} for {whom} to come to it"
    groups = " and ".join(sorted({str(ranks[rank].program.group) for rank in wait.missing}))
    return f"{here} for {_text(program, wait.receive)} from {whom} of {groups}"


def _text(program: Program, index: int) -> str:
    """An instruction as a plan has it, with its place in the program."""
    return f"`{spell_instr(program.written(index))}` (instruction {index})"
