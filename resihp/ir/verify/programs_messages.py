"""Messages of programs: peers, chunks and tensor types, at one end and at both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from resihp.ir.diagnostics import Related
from resihp.ir.expand import chunk_routes
from resihp.ir.lanes import BY_TRANSFER, Lane, Task
from resihp.ir.model import GroupName
from resihp.ir.program import Program, ProgramInstr, Transfer, boundary_type
from resihp.ir.source import ParsedProgram
from resihp.ir.statements import spell_messages, spell_numbers
from resihp.ir.verify.findings import Findings
from resihp.ir.verify.report import Report

__all__ = ["TpGroup", "check_both_ends", "check_own_messages"]


def check_own_messages(parsed: ParsedProgram, lane: Lane, report: Report) -> None:
    """RHP101, RHP409, RHP411, RHP415, RHP425 and RHP426: all that one end shows."""
    program = parsed.program
    for index, instr in enumerate(program.instrs):
        if instr.op.is_transfer:
            for code, message in _own_faults(program, instr, cut=_is_cut(lane, index)):
                report.add(code, lane, index, f"{lane.text(index)}: {message}")


def _is_cut(lane: Lane, index: int) -> bool:
    """Whether the tensor of a send is scattered, or that of a receive gathered."""
    op, task = lane.body[index].op, lane.tasks[index]
    edge = BY_TRANSFER[op]
    cut = edge.scatter if op is edge.send else edge.gather
    return task is not None and (cut, task) in lane.first


def _own_faults(program: Program, instr: ProgramInstr, *, cut: bool) -> Iterator[tuple[str, str]]:
    """(code, message) of what is wrong with the messages of one send or receive."""
    world = program.mesh.world
    for peer in dict.fromkeys(transfer.peer for transfer in instr.transfers):
        if peer >= world:
            yield "RHP101", f"rank {peer} is not in the mesh, whose ranks are 0..{world - 1}"
        elif peer == program.rank:
            yield "RHP415", f"rank {peer} is this rank itself"
    edge, num_chunks = BY_TRANSFER[instr.op], instr.num_chunks
    reason = _why_not_chunks(program, instr.transfers)
    if num_chunks > 1 and not cut:
        word = edge.scatter if instr.op is edge.send else edge.gather
        yield "RHP409", f"it is in chunks, but there is no `{word.mnemonic}` for it"
    elif reason is not None:
        yield "RHP425", reason
    elif program.batch.tokens % num_chunks:
        yield "RHP411", f"{program.batch.tokens} tokens do not divide into {num_chunks} chunks"
    else:
        expected = boundary_type(program, num_chunks)
        if instr.tensor != expected:
            what = "the whole tensor" if num_chunks == 1 else f"one of {num_chunks} chunks"
            yield "RHP426", f"{what} is {expected}, not {instr.tensor}"


def _why_not_chunks(program: Program, transfers: Sequence[Transfer]) -> str | None:
    """Why a member cannot send or receive these chunks, whoever is at the other end."""
    tp, index, num_chunks = program.tp, program.tp_index, transfers[0].num_chunks
    if any(transfer.num_chunks != num_chunks for transfer in transfers):
        return "its chunks are not all of the same tensor"
    if num_chunks == 1:
        whole = [transfer.chunk for transfer in transfers] == [0]
        return None if whole else "a whole tensor is one message, chunk 0 of 1"
    most = program.mesh.tp
    if not 1 < num_chunks <= most or num_chunks % tp:
        return f"{num_chunks} chunks are not those of a group of {tp} and one of at most {most}"
    chunks = range(index * num_chunks // tp, (index + 1) * num_chunks // tp)
    if [transfer.chunk for transfer in transfers] != list(chunks):
        listed = spell_numbers(chunks)
        return f"member {index} of {tp} has chunk {listed} of {num_chunks}, in this order"
    if len({transfer.peer for transfer in transfers}) < len(transfers):
        return f"each of {num_chunks} members at the other end has one chunk"
    return None


class TpGroup(NamedTuple):
    """The programs of a group, member by member, and the lane that they run."""

    members: tuple[ParsedProgram, ...]
    lane: Lane

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks."""
        return tuple(member.program.rank for member in self.members)


def check_both_ends(
    groups: Mapping[GroupName, TpGroup], owners: Mapping[Task, GroupName], findings: Findings
) -> None:
    """RHP414, RHP420 and RHP421 for every message between groups that compute both ends."""
    known = {rank for group in groups.values() for rank in group.ranks}
    for group in groups.values():
        lane = group.lane
        for index, instr in enumerate(lane.body):
            if not instr.op.is_transfer:
                continue
            far = _far_end(groups, owners, lane, index)
            if far is not None:
                for member in group.members:
                    _check_member(member, index, group, *far, known, findings)


def _far_end(
    groups: Mapping[GroupName, TpGroup], owners: Mapping[Task, GroupName], lane: Lane, index: int
) -> tuple[TpGroup, Task] | None:
    """The group at the other end and what it computes there; None where others report."""
    op, task = lane.body[index].op, lane.tasks[index]
    edge = BY_TRANSFER[op]
    if task is None:
        return None
    step = edge.stage_step if op is edge.send else -edge.stage_step
    far = task.at(task.stage + step)
    name = owners.get(far)
    if name is None or name == lane.name or owners.get(task) != lane.name:
        return None
    return groups[name], far


def _check_member(
    member: ParsedProgram,
    index: int,
    group: TpGroup,
    far: TpGroup,
    far_task: Task,
    known: set[int],
    findings: Findings,
) -> None:
    program, instr = member.program, member.program.instrs[index]
    cut = _is_cut(group.lane, index)
    expected = _expected(program, instr, far, cut=cut)
    if not expected:
        return  # RHP410
    tensor = boundary_type(program, expected[0].num_chunks)
    if (instr.transfers, instr.tensor) == (expected, tensor):
        return
    text, where = group.lane.text(index), f"of rank {program.rank}"
    right = f"`{spell_messages(instr.op, expected, tensor)}`"
    span = member.run.span(index)
    peers = {transfer.peer for transfer in instr.transfers}
    ends = _far_instrs(instr, far, far_task, expected)
    if peers - known:
        lacking = spell_numbers(sorted(peers - known))
        message = f"{text} {where}: there is no program of rank {lacking}"
        findings.add("RHP421", span, message, hint=f"write {right}", detail=program.rank)
    elif not peers <= set(far.ranks):
        wrong = spell_numbers(sorted(peers - set(far.ranks)))
        message = (
            f"{text} {where} names rank {wrong}, but {far.lane.name}, whose ranks are "
            f"{spell_numbers(far.ranks)}, is at the other end"
        )
        findings.add("RHP414", span, message, related=ends, hint=f"write {right}")
    else:
        given = f"`{spell_messages(instr.op, instr.transfers, instr.tensor)}`"
        message = f"{text} {where} has {given}, the other end needs {right}"
        findings.add("RHP420", span, message, related=ends, hint=f"write {right}")


def _expected(
    program: Program, instr: ProgramInstr, far: TpGroup, *, cut: bool
) -> tuple[Transfer, ...]:
    """The messages of this member; none where unequal degrees do not cut."""
    here, there = program.tp, len(far.members)
    if not cut:
        return (Transfer(far.ranks[program.tp_index], 0, 1),) if here == there else ()
    sends = instr.op is BY_TRANSFER[instr.op].send
    routes = chunk_routes(here, there) if sends else chunk_routes(there, here)
    transfers: list[Transfer] = []
    for chunk, (source, target) in enumerate(routes):
        mine, theirs = (source, target) if sends else (target, source)
        if mine == program.tp_index:
            transfers.append(Transfer(far.ranks[theirs], chunk, len(routes)))
    return tuple(transfers)


def _far_instrs(
    instr: ProgramInstr, far: TpGroup, far_task: Task, expected: Sequence[Transfer]
) -> tuple[Related, ...]:
    """The other ends of the messages, in the programs of those that have them."""
    edge = BY_TRANSFER[instr.op]
    sends = instr.op is edge.send
    at = far.lane.first.get((edge.recv if sends else edge.send, far_task))
    if at is None:
        return ()
    verb = "receives it" if sends else "sends it"
    ranks = {transfer.peer for transfer in expected}
    return tuple(
        Related(f"rank {member.program.rank} {verb} here", member.run.span(at))
        for member in far.members
        if member.program.rank in ranks
    )
