"""Findings about a torch CSV, told in its own terms: row, cell and what stands there."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from resihp.ir.diagnostics import Diagnostic, Related, Span
from resihp.ir.torch_actions import quoted

__all__ = ["VOCABULARY_HINT", "explain_words", "name_cells"]

VOCABULARY_HINT = "in findings B is the I of the file, and BW its B"
_BACKWARD = re.compile(r"`BW?\b")


def name_cells(diagnostics: Sequence[Diagnostic], text: str) -> list[Diagnostic]:
    """The same findings; each message, and each note, ends with the cell that it points at.

    Rows and cells count from 0: row k is rank k, as torch counts them.
    """
    lines = text.split("\n")

    def named(message: str, span: Span) -> str:
        return f"{message} ({_cell_at(lines, span)})"

    return [
        replace(
            diagnostic,
            message=named(diagnostic.message, diagnostic.span),
            related=tuple(
                Related(named(place.message, place.span), place.span)
                for place in diagnostic.related
            ),
        )
        for diagnostic in diagnostics
    ]


def explain_words(diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """The same findings; the first one that speaks of a backward says whose words it uses."""
    explained = list(diagnostics)
    for index, diagnostic in enumerate(diagnostics):
        texts = [diagnostic.message, *(place.message for place in diagnostic.related)]
        if any(_BACKWARD.search(text) for text in texts):
            before = "" if diagnostic.hint is None else f"{diagnostic.hint}; "
            explained[index] = replace(diagnostic, hint=before + VOCABULARY_HINT)
            break
    return explained


def _cell_at(lines: Sequence[str], span: Span) -> str:
    """`row 0, cell 3: `0F1`` for a place inside a cell; otherwise the row or its end."""
    line = lines[span.line - 1] if span.line <= len(lines) else ""
    row = f"row {span.line - 1}"
    start, end = span.column - 1, span.end_column - 1
    if not line or "," in line[start : end - 1]:
        return row
    if start >= len(line):
        return f"end of {row}"
    begin = line.rfind(",", 0, start) + 1
    after = line.find(",", begin)
    cell = line[begin : len(line) if after < 0 else after].strip(" \t")
    shown = f": {quoted(cell)}" if cell else ""
    return f"{row}, cell {line.count(',', 0, start)}{shown}"
