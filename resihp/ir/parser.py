"""Text to plan or schedule. Reports every fault that it can find, with place and advice."""

from __future__ import annotations

from itertools import chain

from resihp.ir import canonical
from resihp.ir.diagnostics import Span
from resihp.ir.levels import misplaced_instruction
from resihp.ir.lines import BLANKS, LineError, code_of
from resihp.ir.model import (
    Batch,
    Group,
    Instr,
    Level,
    Mesh,
    ModelShape,
    Plan,
    Resume,
    Source,
    Stream,
)
from resihp.ir.reader import MAX_ERRORS, MAX_LINE, MAX_TEXT, Reader, normalise
from resihp.ir.reading import read_instruction, read_source
from resihp.ir.source import BodyPlaces, Parsed, StreamSource, instruction_columns
from resihp.ir.statements import (
    Lost,
    Memory,
    Order,
    PrecisionName,
    Recompute,
    ReconfigureHead,
    Returned,
    Standby,
    Statement,
    StreamHead,
    TransportName,
    Version,
    spell_instr,
)
from resihp.ir.structure import Block

__all__ = ["MAX_ERRORS", "MAX_LINE", "MAX_TEXT", "normalise", "parse"]


def parse(text: str, *, path: str | None = None) -> Parsed:
    """Read a plan or a schedule.

    Raises `PlanSyntaxError` (the user's fault) whose diagnostics hold up to `MAX_ERRORS` faults.
    """
    text = normalise(text)
    reader = _PlanReader()
    reader.run(text, path)
    return reader.parsed(text, path)


class _Lines(dict[str, tuple[Instr, ...]]):
    """The instructions of each distinct line of stream blocks: none, one, or a pair.

    Equal instructions are one object. Raises `LineError` for a line that cannot be read.
    """

    level = Level.PLAN

    def __missing__(self, line: str) -> tuple[Instr, ...]:
        instrs = canonical.read_instruction(line)
        tidy = line
        if instrs is None:
            instrs = read_instruction(line)
            tidy = "  " + " & ".join(map(spell_instr, instrs))
        if self.level is Level.SCHEDULE:
            self._check_level(line, instrs)
        if instrs and tidy != line:
            instrs = self.setdefault(tidy, instrs)
        self[line] = instrs
        return instrs

    def _check_level(self, line: str, instrs: tuple[Instr, ...]) -> None:
        for instr, (column, end) in zip(instrs, instruction_columns(code_of(line)), strict=True):
            where = misplaced_instruction(self.level, instr.op)
            if where is not None:
                message = f"`{instr.op.mnemonic}` does not belong in a {self.level}"
                raise LineError(column, end, message, hint=where, code="RHP007")


class _PlanReader(Reader):
    """Collects groups, sources of state and streams."""

    levels = (Level.PLAN, Level.SCHEDULE)
    required = ("model", "mesh", "batch")

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[Group] = []
        self.group_places: list[Span] = []
        self.sources: list[Source] = []
        self.source_places: list[Span] = []
        self.streams: list[Stream] = []
        self.stream_places: list[StreamSource] = []
        self.bodies: dict[str, tuple[tuple[Instr, ...], BodyPlaces]] = {}
        self.lines = _Lines()

    def start(self, level: Level) -> None:
        """The level of the text, known from its first line."""
        super().start(level)
        self.lines.level = level

    def take(self, statement: Statement, block: Block, span: Span) -> None:
        """A group, or a block."""
        match statement:
            case Group():
                self.groups.append(statement)
                self.group_places.append(span)
            case StreamHead():
                self._read_stream(statement, block, span)
            case _:
                assert isinstance(statement, ReconfigureHead)
                self.once_only(statement, span)
                self._read_sources(block)

    def _read_sources(self, block: Block) -> None:
        assert block.body is not None
        for offset, line in enumerate(block.body.split("\n")):
            try:
                source = read_source(line, self.budget)
            except LineError as error:
                self.fault(block.body_line + offset, error)
                if len(self.faults) >= MAX_ERRORS:
                    return
                continue
            if source is not None:
                self.sources.append(source)
                code = code_of(line)
                column = len(code) - len(code.lstrip(BLANKS)) + 1
                self.source_places.append(Span(block.body_line + offset, column, len(code) + 1))

    def _read_stream(self, head: StreamHead, block: Block, span: Span) -> None:
        assert block.body is not None
        known = self.bodies.get(block.body) or self._read_body(block.body_line, block.body)
        body, places = known
        self.streams.append(Stream(replicas=head.replicas, pp=head.pp, body=body))
        self.stream_places.append(StreamSource(head=span, body_line=block.body_line, body=places))

    def _read_body(self, body_line: int, body: str) -> tuple[tuple[Instr, ...], BodyPlaces]:
        lines = body.split("\n")
        places = BodyPlaces(body)
        try:
            instrs = tuple(chain.from_iterable(map(self.lines.__getitem__, lines)))
        except LineError:
            self._tell(body_line, lines)
            return (), places
        self.bodies[body] = instrs, places
        return instrs, places

    def _tell(self, body_line: int, lines: list[str]) -> None:
        """Find all faults of a body that has one."""
        for offset, line in enumerate(lines):
            try:
                self.lines[line]
            except LineError as error:
                self.fault(body_line + offset, error)
                if len(self.faults) >= MAX_ERRORS:
                    return

    def parsed(self, text: str, path: str | None) -> Parsed:
        """The result; every check has passed."""
        return Parsed(
            plan=self._plan(),
            text=text,
            path=path,
            statements=self.places,
            groups=tuple(self.group_places),
            reconfigure=tuple(self.source_places),
            streams=tuple(self.stream_places),
        )

    def _plan(self) -> Plan:
        model, mesh, batch = self.once["model"], self.once["mesh"], self.once["batch"]
        assert isinstance(model, ModelShape)
        assert isinstance(mesh, Mesh)
        assert isinstance(batch, Batch)
        order, memory = self.once.get("order"), self.once.get("memory")
        resume, transport = self.once.get("resume"), self.once.get("transport")
        precision, recompute = self.once.get("precision"), self.once.get("recompute")
        standby, lost = self.once.get("standby"), self.once.get("lost")
        returned = self.once.get("returned")
        version = self.once["plan"]
        assert isinstance(version, Version)
        return Plan(
            model=model,
            mesh=mesh,
            batch=batch,
            groups=tuple(self.groups),
            streams=tuple(self.streams),
            schedule=order.name if isinstance(order, Order) else None,
            memory_bytes=memory.num_bytes if isinstance(memory, Memory) else None,
            resume=resume if isinstance(resume, Resume) else None,
            standby=standby.ranks if isinstance(standby, Standby) else (),
            lost=lost.ranks if isinstance(lost, Lost) else (),
            returned=returned.ranks if isinstance(returned, Returned) else (),
            reconfigure=tuple(self.sources),
            transport=transport.name if isinstance(transport, TransportName) else None,
            precision=precision.name if isinstance(precision, PrecisionName) else "fp32",
            recompute=recompute.stages if isinstance(recompute, Recompute) else (),
            level=version.level,
            version=version.number,
        )
