"""The first lines of one program: sizes, and whether its `rank` line can be."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from resihp.ir.model import Plan
from resihp.ir.program import Program
from resihp.ir.source import Parsed, ParsedProgram
from resihp.ir.verify.findings import Findings
from resihp.ir.verify.ranges import (
    MAX_INSTRUCTIONS,
    check_layers,
    check_place,
    check_recompute,
    check_sizes,
)
from resihp.ir.verify.topology import why_not_degree

__all__ = ["check_head"]


def check_head(parsed: ParsedProgram, findings: Findings) -> None:
    """RHP101 to RHP103, RHP108, RHP111, RHP203 and RHP424."""
    program = parsed.program
    num_before = len(findings)
    bare = Plan(
        model=program.model,
        mesh=program.mesh,
        batch=program.batch,
        groups=(),
        streams=(),
        recompute=program.recompute,
    )
    place = Parsed(
        plan=bare,
        text=parsed.text,
        path=parsed.path,
        statements=parsed.statements,
        groups=(),
        reconfigure=(),
        streams=(),
    )
    check_sizes(place, findings)
    if len(program.instrs) > MAX_INSTRUCTIONS:
        message = f"the program holds more than {MAX_INSTRUCTIONS} instructions"
        findings.add("RHP108", parsed.run.head, message)
    if len(findings) == num_before:
        _check_rank(parsed, place, findings)
        check_recompute(place, program.num_stages, findings)


def _check_rank(parsed: ParsedProgram, place: Parsed, findings: Findings) -> None:
    program, line = parsed.program, parsed.statement("rank")
    world = program.mesh.world
    if program.rank >= world:
        message = f"rank {program.rank} is not in the mesh, whose ranks are 0..{world - 1}"
        findings.add("RHP101", line, message)
    check_place(place, findings, line, program.group)
    for layers in program.layers:
        check_layers(place, findings, line, layers)
    reason = "cannot be 0" if program.tp == 0 else why_not_degree(place.plan, program.tp)
    if reason is not None:
        message = f"a TP degree of {program.tp} {reason}"
        findings.add("RHP203", parsed.attribute(line, "tp"), message)
    for key, message in _contradictions(program):
        findings.add("RHP424", parsed.attribute(line, key), message, detail=key)


def _contradictions(program: Program) -> Iterator[tuple[str, str]]:
    """What the line says that cannot be true together, with the key to blame."""
    if program.tp_index >= program.tp:
        yield "member", f"member {program.tp_index} is none of 0..{program.tp - 1}"
    stages, layers = program.stages, program.layers
    if len(stages) != len(layers):
        yield "stages", f"{len(stages)} stages cannot hold {len(layers)} ranges of layers"
    elif any(one >= other for one, other in pairwise(stages)) or stages[-1] >= program.num_stages:
        yield "stages", f"stages ascend, and are below {program.num_stages}"
    else:
        yield from _misplaced(program)


def _misplaced(program: Program) -> Iterator[tuple[str, str]]:
    """Stages whose numbers and layers do not fit what lies between them."""
    held = list(zip(program.stages, program.layers, strict=True))
    ends = [(stage, layers.last) for stage, layers in held]
    starts = [(stage, layers.first) for stage, layers in held]
    before = [(-1, -1), *ends]
    after = [*starts, (program.num_stages, program.model.layers)]
    for (stage, last), (next_stage, first) in zip(before, after, strict=True):
        num_stages, num_layers = next_stage - stage - 1, first - last - 1
        if num_layers < 0:
            yield "layers", "ranges of layers ascend and do not overlap"
            return
        if num_layers < num_stages or (num_layers and not num_stages):
            missing = f"{num_stages} stage{'' if num_stages == 1 else 's'}"
            where = f"between stages {stage} and {next_stage}"
            if stage < 0:
                where = f"before stage {next_stage}"
            elif next_stage == program.num_stages:
                where = f"after stage {stage}"
            yield "stages", f"{missing} {where} cannot hold {num_layers} layers"
            return
