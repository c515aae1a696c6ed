"""The programs of one job together: who is there, whether members agree, and the plan they make.

Members of a group run the same instructions in the same order, so a group is a lane as in a plan,
and everything that is proved of a plan is proved of the plan that the programs make. What a plan
leaves to expansion (peers by rank, chunks, tensor types) is compared message by message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resihp.ir.diagnostics import Diagnostic, Related
from resihp.ir.lanes import BY_TRANSFER, Task, lanes_of
from resihp.ir.model import GroupName, Instr, LayerRange, Op
from resihp.ir.program import Program, ProgramInstr
from resihp.ir.source import ParsedProgram
from resihp.ir.statements import spell_instr
from resihp.ir.verify import verify
from resihp.ir.verify.findings import Findings, listed
from resihp.ir.verify.programs_lift import lifted
from resihp.ir.verify.programs_messages import TpGroup, check_both_ends
from resihp.ir.verify.programs_places import Files

__all__ = ["check_set"]

_Members = dict[int, ParsedProgram]
_ALL_OR_ONE = "verify the programs of all ranks in one command, or one of them alone"


def check_set(files: Files, findings: Findings, transport: str | None) -> list[Diagnostic]:
    """What is wrong with programs whose first lines are right; `findings` are part of it.

    RHP421 to RHP424 are about the set as such. Only where there is none of them is there a plan
    that can be verified.
    """
    programs = files.programs
    groups: dict[GroupName, _Members] = {}
    _check_job(programs, findings)
    _check_ranks(programs, groups, findings)
    _check_stages(programs, findings)
    for name, members in groups.items():
        _check_group(name, members, findings)
    if len(findings):
        return findings.sorted()
    return _check_plan(files, groups, findings, transport)


def _check_job(programs: Sequence[ParsedProgram], findings: Findings) -> None:
    """RHP423."""
    first = programs[0]
    for parsed in programs[1:]:
        for keyword in ("model", "mesh", "batch", "precision", "recompute"):
            if getattr(parsed.program, keyword) != getattr(first.program, keyword):
                findings.add(
                    "RHP423",
                    parsed.statement(keyword),
                    f"the `{keyword}` line differs from that of rank {first.program.rank}",
                    related=(Related("that one is here", first.statement(keyword)),),
                )
        if parsed.program.num_stages != first.program.num_stages:
            findings.add(
                "RHP423",
                parsed.attribute(parsed.statement("rank"), "of"),
                f"the model has {parsed.program.num_stages} stages here, "
                f"{first.program.num_stages} in the program of rank {first.program.rank}",
                related=(Related("that one is here", first.statement("rank")),),
            )


def _check_ranks(
    programs: Sequence[ParsedProgram], groups: dict[GroupName, _Members], findings: Findings
) -> None:
    """RHP421 for a rank that is given twice, RHP424 for a seat that is; fills `groups`."""
    ranks: dict[int, ParsedProgram] = {}
    for parsed in programs:
        program, line = parsed.program, parsed.statement("rank")
        first = ranks.setdefault(program.rank, parsed)
        if first is not parsed:
            related = (Related("the first is here", first.statement("rank")),)
            message = f"a second program of rank {program.rank}"
            findings.add("RHP421", line, message, related=related)
            continue
        seated = groups.setdefault(program.group, {}).setdefault(program.tp_index, parsed)
        if seated is not parsed:
            findings.add(
                "RHP424",
                parsed.attribute(line, "member"),
                f"member {program.tp_index} of {program.group} is rank {seated.program.rank} too",
                related=(Related("that one is here", seated.statement("rank")),),
            )


def _check_stages(programs: Sequence[ParsedProgram], findings: Findings) -> None:
    """RHP424 for a stage that is two things, RHP421 for one that is nowhere."""
    first: dict[int, tuple[tuple[int, LayerRange], ParsedProgram]] = {}
    for parsed in programs:
        program = parsed.program
        for stage, layers in zip(program.stages, program.layers, strict=True):
            place = program.group.pp, layers
            before, where = first.setdefault(stage, (place, parsed))
            if before != place:
                findings.add(
                    "RHP424",
                    parsed.attribute(parsed.statement("rank"), "stages"),
                    f"stage {stage} is layers {layers} at pp{place[0]} here, layers {before[1]} "
                    f"at pp{before[0]} in the program of rank {where.program.rank}",
                    related=(Related("that one is here", where.statement("rank")),),
                )
    missing = [stage for stage in range(programs[0].program.num_stages) if stage not in first]
    if missing:
        findings.add(
            "RHP421",
            programs[0].statement("rank"),
            f"no program here runs stage {listed(missing)}",
            hint=_ALL_OR_ONE,
        )


def _check_group(name: GroupName, members: _Members, findings: Findings) -> None:
    """RHP421 for members that lack, RHP422 for members that differ."""
    first = min(members.items())[1]
    missing = [index for index in range(first.program.tp) if index not in members]
    if missing:
        findings.add(
            "RHP421",
            first.statement("rank"),
            f"{name} has {first.program.tp} members; the program of member {listed(missing)} is "
            "not here",
            hint=_ALL_OR_ONE,
        )
    for parsed in members.values():
        if parsed is not first:
            _check_member(name, first, parsed, findings)


def _check_member(
    name: GroupName, first: ParsedProgram, parsed: ParsedProgram, findings: Findings
) -> None:
    """RHP422."""
    here, there = parsed.program, first.program
    line = parsed.statement("rank")
    for key, mine, its in (
        ("tp", here.tp, there.tp),
        ("layers", here.layers, there.layers),
        ("stages", here.stages, there.stages),
    ):
        if mine != its:
            findings.add(
                "RHP422",
                parsed.attribute(line, key),
                f"`{key}` differs from that of rank {there.rank}, which is in {name} too",
                related=(Related("that one is here", first.statement("rank")),),
                detail=key,
            )
    same = min(len(here.instrs), len(there.instrs))
    at = next((i for i in range(same) if _what(here, i) != _what(there, i)), same)
    if at == len(here.instrs) == len(there.instrs):
        return
    span = parsed.run.span(at) if at < len(here.instrs) else parsed.run.head
    other = first.run.span(at) if at < len(there.instrs) else first.run.head
    findings.add(
        "RHP422",
        span,
        f"rank {here.rank} runs {_text(here, at)} as number {at + 1}, rank {there.rank} of the "
        f"same group {_text(there, at)}",
        related=(Related(f"rank {there.rank} is here", other),),
        hint=f"members of {name} run the same instructions in the same order; only their peers "
        "and chunks differ",
    )


def _what(program: Program, index: int) -> tuple[object, ...]:
    """What members of a group have in common of an instruction."""
    instr = program.instrs[index]
    return instr.op, instr.stage, instr.home, instr.microbatch, instr.paired


def _text(program: Program, index: int) -> str:
    if index >= len(program.instrs):
        return "nothing more"
    instr = program.instrs[index]
    stage = instr.stage if len(program.stages) > 1 else None
    return f"`{spell_instr(Instr(instr.op, instr.microbatch, instr.home, stage))}`"


def _check_plan(
    files: Files,
    groups: Mapping[GroupName, _Members],
    findings: Findings,
    transport: str | None,
) -> list[Diagnostic]:
    """Everything that is proved of a plan, and the messages."""
    members = {
        name: tuple(parsed for _, parsed in sorted(seats.items()))
        for name, seats in sorted(groups.items())
    }
    firsts = [seats[0] for seats in members.values()]
    ranks = [tuple(parsed.program.rank for parsed in seats) for seats in members.values()]
    of_rank = {rank: name for name, own in zip(members, ranks, strict=True) for rank in own}
    owners = _owners(firsts)

    def replica_of_peer(parsed: ParsedProgram, instr: ProgramInstr) -> int | None:
        """Of the group that computes the other end, so that the plan is right about it.

        What the message names is compared with that in `check_both_ends`.
        """
        own = parsed.program.group.replica
        far = owners.get(_far_task(instr))
        if far is None:
            far = of_rank.get(instr.transfers[0].peer)
        return None if far is None or far.replica == own else far.replica

    plan = lifted(files, firsts, ranks, replica_of_peer)
    lanes = lanes_of(plan.plan)
    check_both_ends(
        {name: TpGroup(seats, lanes[name]) for name, seats in members.items()}, owners, findings
    )
    found = [*findings.sorted(), *verify(plan, transport=transport)]
    return sorted(found, key=lambda finding: (finding.span, finding.code))


def _owners(firsts: Sequence[ParsedProgram]) -> dict[Task, GroupName]:
    """The group that runs F of each task first."""
    owners: dict[Task, GroupName] = {}
    for parsed in firsts:
        for instr in parsed.program.instrs:
            if instr.op is Op.F:
                owners.setdefault(_task(instr, instr.stage), parsed.program.group)
    return owners


def _task(instr: ProgramInstr, stage: int | None) -> Task:
    """No group owns stage -1, which stands for one that is not given."""
    assert instr.home is not None
    assert instr.microbatch is not None
    return Task(-1 if stage is None else stage, instr.home, instr.microbatch)


def _far_task(instr: ProgramInstr) -> Task:
    """The task at the other end of a send or receive."""
    edge = BY_TRANSFER[instr.op]
    step = edge.stage_step if instr.op is edge.send else -edge.stage_step
    return _task(instr, None if instr.stage is None else instr.stage + step)
