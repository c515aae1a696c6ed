"""A plan together with the places in the text that it was read from."""

from __future__ import annotations

import re
from functools import cached_property

import msgspec

from resihp.ir.diagnostics import Span
from resihp.ir.model import Plan

__all__ = ["Parsed", "StreamSource"]


class StreamSource(msgspec.Struct, frozen=True, kw_only=True):
    """Places of one stream. Streams with the same text share `positions`."""

    head: Span
    body_line: int
    """Line of the text right after `{`."""
    positions: tuple[tuple[int, int, int], ...]
    """(lines below `body_line`, column, end column) of each instruction."""

    def span(self, index: int) -> Span:
        """Place of instruction `index` of the body."""
        offset, column, end_column = self.positions[index]
        return Span(self.body_line + offset, column, end_column)


class Parsed(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What `parse` returns: the plan, its text (newlines as `\\n`) and its places."""

    plan: Plan
    text: str
    path: str | None
    statements: dict[str, Span]
    """Places of the lines that appear at most once, by first word (`mesh`, `lost`, …)."""
    groups: tuple[Span, ...]
    """One place per entry of `plan.groups`."""
    reshards: tuple[Span, ...]
    """One place per entry of `plan.reconfigure`."""
    streams: tuple[StreamSource, ...]
    """One per entry of `plan.streams`."""

    @cached_property
    def lines(self) -> list[str]:
        """The text line by line, split when first asked for."""
        return self.text.split("\n")

    def statement(self, keyword: str) -> Span:
        """Place of the line that starts with `keyword`; the `plan` line where there is none."""
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
