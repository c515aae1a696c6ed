"""Programs as a plan again: each group runs what the first of its members runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resihp.ir.model import Group, Instr, Plan, Stream
from resihp.ir.program import ProgramInstr
from resihp.ir.source import ParsedProgram
from resihp.ir.verify.programs_places import Files, JoinedPlan

__all__ = ["PeerOf", "lifted"]

PeerOf = Callable[[ParsedProgram, ProgramInstr], int | None]
"""The replica at the other end of a send or receive; None: the own one."""


def lifted(
    files: Files, firsts: Sequence[ParsedProgram], ranks: Sequence[tuple[int, ...]], peer_of: PeerOf
) -> JoinedPlan:
    """The plan of the groups whose first members are `firsts`, with `ranks` as members.

    Its places are those of the first members; its `mesh` and other lines those of the very first.
    """
    head = firsts[0]
    used = {rank for members in ranks for rank in members}
    world = head.program.mesh.world
    plan = Plan(
        model=head.program.model,
        mesh=head.program.mesh,
        batch=head.program.batch,
        groups=tuple(_group(*pair) for pair in zip(firsts, ranks, strict=True)),
        streams=tuple(_stream(first, peer_of) for first in firsts),
        precision=head.program.precision,
        recompute=head.program.recompute,
        standby=tuple(rank for rank in range(world) if rank not in used),
    )
    return JoinedPlan(
        plan=plan,
        text=files.text,
        path=head.path,
        statements=head.statements,
        groups=tuple(first.statement("rank") for first in firsts),
        reconfigure=(),
        streams=tuple(first.run for first in firsts),
        files=files,
    )


def _group(first: ParsedProgram, ranks: tuple[int, ...]) -> Group:
    replica, pp = first.program.group
    return Group(replica=replica, pp=pp, ranks=ranks, layers=first.program.layers)


def _stream(first: ParsedProgram, peer_of: PeerOf) -> Stream:
    replica, pp = first.program.group
    sole = first.program.stages[0] if len(first.program.stages) == 1 else None
    body = tuple(
        Instr(
            instr.op,
            instr.microbatch,
            instr.home,
            None if instr.stage == sole else instr.stage,
            peer_of(first, instr) if instr.op.is_transfer else None,
            instr.paired,
        )
        for instr in first.program.instrs
    )
    return Stream(replicas=(replica,), pp=pp, body=body)
