"""What reading a text has in common at all levels: the lines outside of blocks, and the faults."""

from __future__ import annotations

from abc import ABC, abstractmethod

from resihp.errors import PlanSyntaxError
from resihp.ir.diagnostics import Diagnostic, Related, Span
from resihp.ir.header import Header, read_header
from resihp.ir.levels import BODY_WORDS, misplaced_statement
from resihp.ir.lines import MAX_ERRORS, Budget, LineError, code_of, squeeze
from resihp.ir.model import Level
from resihp.ir.reading import read_statement
from resihp.ir.statements import (
    Group,
    ReconfigureHead,
    RunHead,
    Statement,
    StreamHead,
    Version,
    keyword_of,
)
from resihp.ir.structure import Block, split

__all__ = ["MAX_ERRORS", "MAX_LINE", "MAX_TEXT", "Reader", "normalise", "syntax_error"]

MAX_TEXT = 64 << 20
"""Longest text that is read, in characters."""
MAX_LINE = 1 << 16


def normalise(text: str) -> str:
    """`text` without byte order mark, with newlines as `\\n`."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def syntax_error(faults: list[Diagnostic], path: str | None) -> PlanSyntaxError:
    """The error that carries up to `MAX_ERRORS` of `faults`, in the order of the text."""
    kept = sorted(faults, key=lambda fault: fault.span)[:MAX_ERRORS]
    where = path or "<text>"
    first = kept[0]
    count = f"{len(kept)} faults" if len(kept) > 1 else "1 fault"
    message = f"{where}:{first.span.line}:{first.span.column}: {first.message} ({count})"
    return PlanSyntaxError(message, kept)


class Reader(ABC):
    """Collects the statements of one text of one of `levels`, and what is wrong with it.

    A subclass says what becomes of groups and blocks (`take`) and which lines must be there.
    """

    levels: tuple[Level, ...]
    required: tuple[str, ...]

    def __init__(self) -> None:
        self.level = self.levels[0]
        self.faults: list[Diagnostic] = []
        self.budget = Budget()
        self.once: dict[str, Statement] = {}
        self.places: dict[str, Span] = {}

    def run(self, text: str, path: str | None) -> None:
        """Read `text` (as `normalise` gives it).

        Raises `PlanSyntaxError` (the user's fault) with up to `MAX_ERRORS` faults.
        """
        self.faults = _too_large(text)
        header = None if self.faults else read_header(text, self.levels)
        if isinstance(header, Header):
            self.start(header.level)
            self._read_blocks(text)
        elif header is not None:
            self.faults.append(header)
        if self.faults:
            raise syntax_error(self.faults, path)

    def start(self, level: Level) -> None:
        """The level of the text, known from its first line."""
        self.level = level

    @abstractmethod
    def take(self, statement: Statement, block: Block, span: Span) -> None:
        """A statement that opens a block, or that may appear more than once."""

    def fault(self, line: int, error: LineError) -> None:
        """Keep the reason why `line` cannot be read."""
        span = Span(line, error.column, error.end_column)
        self.faults.append(
            Diagnostic(code=error.code, message=error.message, span=span, hint=error.hint)
        )

    def once_only(self, statement: Statement, span: Span) -> None:
        """Keep a statement that may appear once."""
        # The first line has its place under one name, whatever its level.
        keyword = "plan" if isinstance(statement, Version) else keyword_of(statement)
        if keyword not in self.once:
            self.once[keyword] = statement
            self.places[keyword] = span
            return
        self.faults.append(
            Diagnostic(
                code="RHP004",
                message=f"a second `{keyword_of(statement)}` line",
                span=span,
                related=(Related("the first is here", self.places[keyword]),),
            )
        )

    def _read_blocks(self, text: str) -> None:
        blocks, self.faults = split(text)
        for block in blocks:
            self._read_block(block)
            if len(self.faults) >= MAX_ERRORS:
                return
        # A line that is there but unreadable is not missing as well.
        if not self.faults:
            self._check_complete()

    def _read_block(self, block: Block) -> None:
        """One line outside blocks, with its block if it opens one."""
        span = Span(block.line, block.column, block.column + len(block.head))
        try:
            statement = read_statement(block.head, block.column, self.budget)
        except LineError as error:
            self.fault(block.line, error)
            statement = _guess(block)
        if statement is None or not self._is_placed_right(statement, block, span):
            return
        if block.body is not None or isinstance(statement, Group):
            self.take(statement, block, span)
        else:
            self.once_only(statement, span)

    def _is_placed_right(self, statement: Statement, block: Block, span: Span) -> bool:
        """Whether the statement belongs to the level, and has a block just if it needs one."""
        keyword = keyword_of(statement)
        where = misplaced_statement(self.level, keyword)
        if where is not None:
            message = f"`{keyword}` does not belong in a {self.level}"
            self.faults.append(Diagnostic(code="RHP007", message=message, span=span, hint=where))
            return False
        opens = isinstance(statement, StreamHead | ReconfigureHead | RunHead)
        if opens == (block.body is not None):
            return True
        what = "needs a block: end the line with `{`" if opens else "takes no block"
        self.faults.append(Diagnostic(code="RHP005", message=f"`{keyword}` {what}", span=span))
        return False

    def _check_complete(self) -> None:
        """Report required statements that are absent."""
        for keyword in self.required:
            if keyword not in self.once:
                message = f"the {self.level} has no `{keyword}` line"
                span = self.places["plan"]
                self.faults.append(Diagnostic(code="RHP003", message=message, span=span))


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


def _guess(block: Block) -> Statement | None:
    """What a block with an unreadable head is, so that its lines are still checked."""
    if block.body is None:
        return None
    words = {squeeze(code_of(line)).partition(" ")[0] for line in block.body.split("\n")}
    return StreamHead((), 0) if words & BODY_WORDS.keys() else ReconfigureHead()
