"""A plan or program together with the places in the text that it was read from."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from resihp.ir.diagnostics import Span
from resihp.ir.lines import BLANKS, code_of
from resihp.ir.model import Plan
from resihp.ir.program import Program

if TYPE_CHECKING:
    from resihp.ir.arrays import Arrays

__all__ = [
    "BodyPlaces",
    "Parsed",
    "ParsedProgram",
    "Places",
    "StreamSource",
    "Text",
    "instruction_columns",
]


class Places(ABC):
    """Where the instructions of one body stand; found when first asked for."""

    @cached_property
    def positions(self) -> tuple[tuple[int, int, int], ...]:
        """(lines below that of the body, column, end column) of each instruction."""
        return tuple(self.find())

    @abstractmethod
    def find(self) -> Iterator[tuple[int, int, int]]:
        """What `positions` keeps."""


class BodyPlaces(Places):
    """In the text of a block, one instruction or pair a line."""

    def __init__(self, text: str) -> None:
        self._text = text

    def find(self) -> Iterator[tuple[int, int, int]]:
        """Lines count from that of `{`."""
        for offset, line in enumerate(self._text.split("\n")):
            for columns in instruction_columns(code_of(line)):
                yield (offset, *columns)


def instruction_columns(code: str) -> Iterator[tuple[int, int]]:
    """(column, end column) of the instruction of a readable line, or of both of a pair."""
    start = 0
    for part in code.split("&"):
        if part.strip(BLANKS):
            first = start + len(part) - len(part.lstrip(BLANKS))
            yield first + 1, start + len(part.rstrip(BLANKS)) + 1
        start += len(part) + 1


class StreamSource(msgspec.Struct, frozen=True, kw_only=True):
    """Places of one stream. Streams with the same text share `body`."""

    head: Span
    body_line: int
    """Line of the text that `{` stands on."""
    body: Places

    def span(self, index: int) -> Span:
        """Place of instruction `index` of the body."""
        offset, column, end_column = self.body.positions[index]
        return Span(self.body_line + offset, column, end_column)


class Text(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What was read, with the places of its lines."""

    text: str
    """With newlines as `\\n`."""
    path: str | None
    statements: dict[str, Span]
    """Places of the lines that appear at most once, by first word (`mesh`, `lost`, …).

    The first line of the text is `plan`, at any level.
    """

    @cached_property
    def lines(self) -> list[str]:
        """The text line by line, split when first asked for."""
        return self.text.split("\n")

    def statement(self, keyword: str) -> Span:
        """Place of the line that starts with `keyword`; the first line where none does."""
        return self.statements.get(keyword, self.statements["plan"])

    def attribute(self, span: Span, key: str) -> Span:
        """The `key=value` inside the line at `span`; `span` itself where it has none."""
        line = self.lines[span.line - 1]
        found = re.compile(rf"\b{key}\s*=\s*[^\s#]+(?:\s*,\s*[^\s#]+)*").search(
            line, span.column - 1
        )
        if found is None:
            return span
        return Span(span.line, found.start() + 1, found.end() + 1)

    def where(self, span: Span) -> str:
        """How a message names the line of a place."""
        return f"line {span.line}"


class Parsed(Text, frozen=True, kw_only=True, dict=True):
    """What `parse` returns: the plan, its text and its places."""

    plan: Plan
    groups: tuple[Span, ...]
    """One place per entry of `plan.groups`."""
    reconfigure: tuple[Span, ...]
    """One place per entry of `plan.reconfigure`."""
    streams: tuple[StreamSource, ...]
    """One per entry of `plan.streams`."""

    @cached_property
    def arrays(self) -> Arrays | None:
        """The plan as arrays, made when first asked for; see `resihp.ir.arrays`."""
        from resihp.ir.arrays import arrays_of  # imports numpy

        return arrays_of(self.plan)


class ParsedProgram(Text, frozen=True, kw_only=True, dict=True):
    """A program, its places, and the text that it is, or is one part of."""

    program: Program
    run: StreamSource
    """Places of `program.instrs`."""
