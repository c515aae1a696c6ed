"""Findings as workflow commands: GitHub Actions shows each one at its line of the diff.

A command is one line of the log, `::error file=…,line=…::message`. Line breaks, `%` and, inside
the properties, `:` and `,` are written as percent escapes. GitHub shows the first ten errors and
the first ten warnings of a step; the log has them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from resihp.ir.codes import CODES
from resihp.ir.diagnostics import Diagnostic, FileFindings
from resihp.ir.render import summary

__all__ = ["render_github"]

_IN_MESSAGE = {ord("%"): "%25", ord("\r"): "%0D", ord("\n"): "%0A"}
_IN_PROPERTY = {**_IN_MESSAGE, ord(":"): "%3A", ord(","): "%2C"}


def render_github(files: Sequence[FileFindings]) -> str:
    """One command per finding; notes and hint follow in its message. Ends with a line per file."""
    lines: list[str] = []
    for file in files:
        lines += [_command(file.path, finding) for finding in file.diagnostics]
    # Text that is not a command only appears in the log; a path cannot start one with `::`.
    lines += [f"resihp: {_escape(file.path)}: {summary(file.diagnostics)}" for file in files]
    return "\n".join(lines) + "\n"


def _command(path: str, finding: Diagnostic) -> str:
    known = CODES.get(finding.code)
    title = finding.code if known is None else f"{finding.code} {known.title}"
    span = finding.span
    properties = {
        "file": path,
        "line": span.line,
        "endLine": span.line,
        "col": span.column,
        "endColumn": span.end_column,
        "title": title,
    }
    written = ",".join(
        f"{key}={str(value).translate(_IN_PROPERTY)}" for key, value in properties.items()
    )
    message = _escape("\n".join(_message(path, finding)))
    return f"::{finding.severity.value} {written}::{message}"


def _message(path: str, finding: Diagnostic) -> Iterator[str]:
    yield finding.message
    for place in finding.related:
        yield f"{place.path or path}:{place.span.line}:{place.span.column}: {place.message}"
    if finding.hint is not None:
        yield f"hint: {finding.hint}"


def _escape(text: str) -> str:
    return text.translate(_IN_MESSAGE)
