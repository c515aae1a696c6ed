"""Text to plan. Reports every fault that it can find, with place and advice."""

from __future__ import annotations

import re

from resihp.errors import PlanSyntaxError
from resihp.ir.diagnostics import Diagnostic, Related, Span
from resihp.ir.model import (
    FORMAT_VERSION,
    Batch,
    Group,
    Instr,
    Mesh,
    ModelShape,
    Plan,
    Reshard,
    Resume,
    Stream,
)
from resihp.ir.source import Parsed, StreamSource
from resihp.ir.statements import (
    KEYWORDS,
    Lost,
    Memory,
    Order,
    ReconfigureHead,
    Standby,
    Statement,
    StreamHead,
    Version,
)
from resihp.ir.structure import Block, code_of, split
from resihp.ir.syntax import (
    BODY_WORDS,
    Budget,
    LineError,
    read_instruction,
    read_reshard,
    read_statement,
)

__all__ = ["MAX_ERRORS", "MAX_LINE", "MAX_TEXT", "normalise", "parse"]

MAX_TEXT = 64 << 20
"""Longest text that is read, in characters."""
MAX_LINE = 1 << 16
MAX_ERRORS = 50

_Positions = tuple[tuple[int, int, int], ...]
_Body = tuple[tuple[Instr, ...], _Positions]

# The canonical spelling of an instruction; anything else goes through the grammar, which decides.
# About one microsecond instead of twenty.
_CANONICAL = re.compile(r"  ([A-Za-z_]+)(?: (\d{1,9})(?:@(\d{1,9}))?)?")


def parse(text: str, *, path: str | None = None) -> Parsed:
    """Read a plan.

    Raises `PlanSyntaxError` (the user's fault) whose diagnostics hold up to `MAX_ERRORS` faults.
    """
    text = normalise(text)
    faults = _too_large(text) or _wrong_version(text)
    if faults:
        raise _syntax_error(faults, path)
    blocks, faults = split(text)
    reader = _Reader(faults)
    for block in blocks:
        reader.read(block)
        if len(reader.faults) >= MAX_ERRORS:
            break
    else:
        reader.check_complete()
    if reader.faults:
        raise _syntax_error(sorted(reader.faults, key=lambda fault: fault.span), path)
    return reader.parsed(text, path)


def normalise(text: str) -> str:
    """`text` without byte order mark, with newlines as `\\n`."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _syntax_error(faults: list[Diagnostic], path: str | None) -> PlanSyntaxError:
    kept = faults[:MAX_ERRORS]
    where = path or "<text>"
    first = kept[0]
    count = f"{len(kept)} faults" if len(kept) > 1 else "1 fault"
    message = f"{where}:{first.span.line}:{first.span.column}: {first.message} ({count})"
    return PlanSyntaxError(message, kept)


def _too_large(text: str) -> list[Diagnostic]:
    if len(text) > MAX_TEXT:
        message = f"the text has {len(text)} characters; at most {MAX_TEXT} are read"
        return [Diagnostic(code="RHP006", message=message, span=Span(1, 1, 2))]
    start = 0
    while len(text) - start > MAX_LINE:
        newline = text.rfind("\n", start, start + MAX_LINE + 1)
        if newline < 0:
            line = text.count("\n", 0, start) + 1
            message = f"the line is longer than {MAX_LINE} characters"
            return [Diagnostic(code="RHP006", message=message, span=Span(line, 1, 2))]
        start = newline + 1
    return []


def _wrong_version(text: str) -> list[Diagnostic]:
    """The first line that says something must be `plan 1`."""
    for found in re.finditer(r"[^\n]+", text):
        code = code_of(found.group())
        if not code.strip():
            continue
        line = text.count("\n", 0, found.start()) + 1
        column = len(code) - len(code.lstrip()) + 1
        span = Span(line, column, len(code) + 1)
        header = re.fullmatch(r"plan\s+([0-9]+)", code.strip())
        if header is None:
            message = f"a plan starts with the line `plan {FORMAT_VERSION}`"
        elif header[1] != str(FORMAT_VERSION):
            message = (
                f"this is a plan of version {header[1][:20]}; this program reads version "
                f"{FORMAT_VERSION}"
            )
        else:
            return []
        return [Diagnostic(code="RHP002", message=message, span=span)]
    message = f"the text is empty; a plan starts with the line `plan {FORMAT_VERSION}`"
    return [Diagnostic(code="RHP002", message=message, span=Span(1, 1, 2))]


class _Reader:
    """Collects the statements of one text."""

    def __init__(self, faults: list[Diagnostic]) -> None:
        self.faults = faults
        self.budget = Budget()
        self.once: dict[str, Statement] = {}
        self.places: dict[str, Span] = {}
        self.groups: list[Group] = []
        self.group_places: list[Span] = []
        self.reshards: list[Reshard] = []
        self.reshard_places: list[Span] = []
        self.streams: list[Stream] = []
        self.stream_places: list[StreamSource] = []
        self.bodies: dict[str, _Body] = {}
        self.lines: dict[str, tuple[Instr, int, int] | None] = {}

    def read(self, block: Block) -> None:
        """One line outside blocks, with its block if it opens one."""
        span = Span(block.line, block.column, block.column + len(block.head))
        try:
            statement = read_statement(" " * (block.column - 1) + block.head, self.budget)
        except LineError as error:
            self._fault(block.line, error)
            statement = self._guess_block(block)
        if statement is None or not self._check_braces(statement, block, span):
            return
        match statement:
            case Group():
                self.groups.append(statement)
                self.group_places.append(span)
            case StreamHead():
                self._read_stream(statement, block, span)
            case _:
                self._read_once(statement, block, span)

    def _guess_block(self, block: Block) -> Statement | None:
        """What a block with an unreadable head is, so that its lines are still checked."""
        words = {line.split(None, 1)[0] for line in (block.body or "").split("\n") if line.strip()}
        if block.body is None:
            return None
        return StreamHead((), 0) if words & BODY_WORDS.keys() else ReconfigureHead()

    def _check_braces(self, statement: Statement, block: Block, span: Span) -> bool:
        keyword = KEYWORDS[type(statement)]
        opens = isinstance(statement, StreamHead | ReconfigureHead)
        if opens == (block.body is not None):
            return True
        what = "needs a block: end the line with `{`" if opens else "takes no block"
        message = f"`{keyword}` {what}"
        self.faults.append(Diagnostic(code="RHP005", message=message, span=span))
        return False

    def _read_once(self, statement: Statement, block: Block, span: Span) -> None:
        keyword = KEYWORDS[type(statement)]
        if keyword in self.once:
            self.faults.append(
                Diagnostic(
                    code="RHP004",
                    message=f"a second `{keyword}` line",
                    span=span,
                    related=(Related("the first is here", self.places[keyword]),),
                )
            )
        else:
            self.once[keyword] = statement
            self.places[keyword] = span
        if block.body is not None:
            self._read_reshards(block.body_line, block.body)

    def _read_reshards(self, body_line: int, body: str) -> None:
        for offset, line in enumerate(body.split("\n")):
            code = code_of(line)
            if not code:
                continue
            try:
                self.reshards.append(read_reshard(code, self.budget))
            except LineError as error:
                self._fault(body_line + offset, error)
            else:
                column = len(code) - len(code.lstrip()) + 1
                self.reshard_places.append(Span(body_line + offset, column, len(code) + 1))

    def _read_stream(self, head: StreamHead, block: Block, span: Span) -> None:
        assert block.body is not None
        known = self.bodies.get(block.body)
        if known is None:
            known = self._read_body(block.body_line, block.body)
        body, positions = known
        self.streams.append(Stream(replicas=head.replicas, pp=head.pp, body=body))
        self.stream_places.append(
            StreamSource(head=span, body_line=block.body_line, positions=positions)
        )

    def _read_body(self, body_line: int, body: str) -> _Body:
        instrs: list[Instr] = []
        positions: list[tuple[int, int, int]] = []
        num_faults = len(self.faults)
        for offset, line in enumerate(body.split("\n")):
            try:
                decoded = self.lines[line]
            except KeyError:
                try:
                    decoded = self.lines[line] = _read_line(line)
                except LineError as error:
                    self._fault(body_line + offset, error)
                    if len(self.faults) >= MAX_ERRORS:
                        break
                    continue
            if decoded is not None:
                instr, column, end_column = decoded
                instrs.append(instr)
                positions.append((offset, column, end_column))
        result = tuple(instrs), tuple(positions)
        if len(self.faults) == num_faults:
            self.bodies[body] = result
        return result

    def _fault(self, line: int, error: LineError) -> None:
        self.faults.append(
            Diagnostic(
                code=error.code,
                message=error.message,
                span=Span(line, error.column, error.end_column),
                hint=error.hint,
            )
        )

    def check_complete(self) -> None:
        """Report required statements that are absent."""
        # A line that is there but unreadable is not missing as well.
        if self.faults:
            return
        for keyword in ("model", "mesh", "batch"):
            if keyword not in self.once:
                message = f"the plan has no `{keyword}` line"
                span = self.places["plan"]
                self.faults.append(Diagnostic(code="RHP003", message=message, span=span))

    def parsed(self, text: str, path: str | None) -> Parsed:
        """The result; every check has passed."""
        return Parsed(
            plan=self._plan(),
            text=text,
            path=path,
            statements=self.places,
            groups=tuple(self.group_places),
            reshards=tuple(self.reshard_places),
            streams=tuple(self.stream_places),
        )

    def _plan(self) -> Plan:
        model, mesh, batch = self.once["model"], self.once["mesh"], self.once["batch"]
        assert isinstance(model, ModelShape)
        assert isinstance(mesh, Mesh)
        assert isinstance(batch, Batch)
        schedule, memory = self.once.get("order"), self.once.get("memory")
        resume, version = self.once.get("resume"), self.once["plan"]
        standby, lost = self.once.get("standby"), self.once.get("lost")
        assert isinstance(version, Version)
        return Plan(
            model=model,
            mesh=mesh,
            batch=batch,
            groups=tuple(self.groups),
            streams=tuple(self.streams),
            schedule=schedule.name if isinstance(schedule, Order) else None,
            memory_bytes=memory.num_bytes if isinstance(memory, Memory) else None,
            resume=resume if isinstance(resume, Resume) else None,
            standby=standby.ranks if isinstance(standby, Standby) else (),
            lost=lost.ranks if isinstance(lost, Lost) else (),
            reconfigure=tuple(self.reshards),
            version=version.number,
        )


def _read_line(line: str) -> tuple[Instr, int, int] | None:
    """The instruction of a line with its columns; None for a blank or comment line."""
    found = _CANONICAL.fullmatch(line)
    if found is not None:
        word, microbatch, home = found.groups()
        op = BODY_WORDS.get(word)
        if op is not None and op.has_micro_batch == (microbatch is not None):
            number = None if microbatch is None else int(microbatch)
            return Instr(op, number, None if home is None else int(home)), 3, len(line) + 1
    code = code_of(line)
    if not code.strip():
        return None
    return read_instruction(code), len(code) - len(code.lstrip()) + 1, len(code) + 1
