"""Programs as text, and text as programs. A text may hold the programs of several ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from resihp.errors import PlanSyntaxError
from resihp.ir.diagnostics import Diagnostic, Related, Span
from resihp.ir.lines import Budget, LineError
from resihp.ir.model import Batch, Instr, Level, Mesh, ModelShape, Op
from resihp.ir.program import Program, ProgramInstr
from resihp.ir.reader import MAX_ERRORS, Reader, normalise, syntax_error
from resihp.ir.reading import read_program_line
from resihp.ir.source import BodyPlaces, ParsedProgram, StreamSource
from resihp.ir.statements import (
    PrecisionName,
    ProgramLine,
    RankHead,
    Recompute,
    RunHead,
    Statement,
    Version,
    columns_of,
    spell_program_line,
)
from resihp.ir.structure import Block

__all__ = ["parse_programs", "print_program"]

_NO_NOTES: Mapping[int, str] = {}
_HEADER = re.compile(rf"^[ \t]*{Level.PROGRAM}\b", re.MULTILINE)
_TRANSFER_OF = {
    Op.SCATTER_ACT: Op.SEND_ACT,
    Op.GATHER_ACT: Op.RECV_ACT,
    Op.SCATTER_GRAD: Op.SEND_GRAD,
    Op.GATHER_GRAD: Op.RECV_GRAD,
}


# --- printing --------------------------------------------------------------------------------


def print_program(program: Program, notes: Mapping[int, str] = _NO_NOTES) -> str:
    """The canonical text of a program; `parse_programs` gives it back.

    `notes` become comments at the ends of instructions, by index.
    """
    head = RankHead(
        rank=program.rank,
        group=program.group,
        member=program.tp_index,
        tp=program.tp,
        layers=program.layers,
        stages=program.stages,
        num_stages=program.num_stages,
    )
    version = Version(Level.PROGRAM, program.version)
    statements: list[Statement] = [version, program.model, program.mesh, program.batch]
    if program.precision != "fp32":
        statements.append(PrecisionName(program.precision))
    if program.recompute:
        statements.append(Recompute(program.recompute))
    lines = [" ".join(columns_of(statement)) for statement in statements]
    lines += ["", " ".join(columns_of(head)), "", "run {"]
    lines += _body(program, notes)
    return "\n".join([*lines, "}", ""])


def _body(program: Program, notes: Mapping[int, str]) -> Iterator[str]:
    """The instructions; both of a pair in one line."""
    sole = program.stages[0] if len(program.stages) == 1 else None
    line = " "
    for index, instr in enumerate(program.instrs):
        line += f" {_spell(instr, sole)}"
        if instr.paired:
            line += " &"
            continue
        note = f"  # {notes[index]}" if index in notes else ""
        yield line + note
        line = " "
    assert line == " ", "a pair has a second instruction"


def _spell(instr: ProgramInstr, sole: int | None) -> str:
    """The stage is left out where there is only one, the home never."""
    stage = None if instr.stage == sole else instr.stage
    written = Instr(instr.op, instr.microbatch, instr.home, stage)
    return spell_program_line(ProgramLine(written, instr.transfers, instr.tensor))


# --- reading ---------------------------------------------------------------------------------


def parse_programs(text: str, *, path: str | None = None) -> tuple[ParsedProgram, ...]:
    """Read one or more programs, each from a line `program 1` on.

    Raises `PlanSyntaxError` (the user's fault) whose diagnostics hold up to `MAX_ERRORS` faults.
    """
    text = normalise(text)
    budget = Budget()
    parsed: list[ParsedProgram] = []
    faults: list[Diagnostic] = []
    for start, end in _parts(text):
        first_line = text.count("\n", 0, start)
        reader = _ProgramReader(budget)
        try:
            reader.run(text[start:end], path)
        except PlanSyntaxError as error:
            faults += (_moved(fault, first_line) for fault in error.diagnostics)
            if len(faults) >= MAX_ERRORS:
                break
        else:
            parsed.append(reader.parsed(text, path, first_line))
    if faults:
        raise syntax_error(faults, path)
    return tuple(parsed)


def _parts(text: str) -> Iterator[tuple[int, int]]:
    """Where each program starts and ends; the first one has all that stands before."""
    starts = [found.start() for found in _HEADER.finditer(text)]
    starts[:1] = [0]
    yield from zip(starts, [*starts[1:], len(text)], strict=True)


def _moved(fault: Diagnostic, num_lines: int) -> Diagnostic:
    return Diagnostic(
        code=fault.code,
        message=fault.message,
        span=_down(fault.span, num_lines),
        severity=fault.severity,
        related=tuple(
            Related(place.message, _down(place.span, num_lines)) for place in fault.related
        ),
        hint=fault.hint,
    )


def _down(span: Span, num_lines: int) -> Span:
    return Span(span.line + num_lines, span.column, span.end_column)


class _ProgramReader(Reader):
    """Collects the statements and instructions of one program."""

    levels = (Level.PROGRAM,)
    required = ("model", "mesh", "batch", "rank", "run")

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self.budget = budget
        self.instrs: list[ProgramLine] = []
        self.block: Block | None = None

    def take(self, statement: Statement, block: Block, span: Span) -> None:
        """The run block."""
        assert isinstance(statement, RunHead)
        assert block.body is not None
        self.once_only(statement, span)
        if self.block is not None:
            return  # reported as a second one
        self.block = block
        for offset, line in enumerate(block.body.split("\n")):
            try:
                self.instrs += read_program_line(line)
            except LineError as error:
                self.fault(block.body_line + offset, error)
                if len(self.faults) >= MAX_ERRORS:
                    return

    def parsed(self, text: str, path: str | None, first_line: int) -> ParsedProgram:
        """The result; every check has passed. `first_line` lines of `text` stand before it."""
        block = self.block
        assert block is not None
        assert block.body is not None
        places = {word: _down(span, first_line) for word, span in self.places.items()}
        return ParsedProgram(
            program=self._program(),
            text=text,
            path=path,
            statements=places,
            run=StreamSource(
                head=places["run"],
                body_line=block.body_line + first_line,
                body=BodyPlaces(block.body),
            ),
        )

    def _program(self) -> Program:
        model, mesh, batch = self.once["model"], self.once["mesh"], self.once["batch"]
        head, version = self.once["rank"], self.once["plan"]
        precision, recompute = self.once.get("precision"), self.once.get("recompute")
        assert isinstance(model, ModelShape)
        assert isinstance(mesh, Mesh)
        assert isinstance(batch, Batch)
        assert isinstance(head, RankHead)
        assert isinstance(version, Version)
        return Program(
            model=model,
            mesh=mesh,
            batch=batch,
            rank=head.rank,
            group=head.group,
            tp_index=head.member,
            tp=head.tp,
            layers=head.layers,
            stages=head.stages,
            num_stages=head.num_stages,
            instrs=tuple(_resolved(self.instrs, head)),
            precision=precision.name if isinstance(precision, PrecisionName) else "fp32",
            recompute=recompute.stages if isinstance(recompute, Recompute) else (),
            version=version.number,
        )


def _resolved(lines: Sequence[ProgramLine], head: RankHead) -> Iterator[ProgramInstr]:
    """Defaults filled in: the home, the stage where there is only one, chunks of scatters."""
    instrs = [_instr(line, head) for line in lines]
    num_chunks = {
        (instr.op, instr.stage, instr.home, instr.microbatch): instr.num_chunks
        for instr in instrs
        if instr.transfers
    }
    for instr in instrs:
        transfer = _TRANSFER_OF.get(instr.op)
        if transfer is None:
            yield instr
        else:
            key = transfer, instr.stage, instr.home, instr.microbatch
            yield replace(instr, num_chunks=num_chunks.get(key, 1))


def _instr(line: ProgramLine, head: RankHead) -> ProgramInstr:
    instr, transfers, tensor = line
    stage, home = instr.stage, instr.home
    if stage is None and instr.op.has_stage and len(head.stages) == 1:
        stage = head.stages[0]
    if home is None and instr.microbatch is not None:
        home = head.group.replica
    return ProgramInstr(
        op=instr.op,
        microbatch=instr.microbatch,
        home=home,
        stage=stage,
        paired=instr.paired,
        transfers=transfers,
        tensor=tensor,
        num_chunks=transfers[0].num_chunks if transfers else 1,
    )
