"""Findings of the parser and the verifier: code, place, message, related places, hint."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Diagnostic", "FileFindings", "Related", "Severity", "Span"]


class Span(msgspec.Struct, frozen=True, order=True):
    """Columns `column .. end_column - 1` of line `line`; both count from 1."""

    line: int
    column: int
    end_column: int


class Severity(enum.Enum):
    """How bad a finding is. Only errors keep a plan from being deployed."""

    ERROR = "error"
    WARNING = "warning"


class Related(msgspec.Struct, frozen=True, omit_defaults=True):
    """Another place that explains a finding, such as the send that a receive waits for."""

    message: str
    span: Span
    path: str | None = None
    """The file of the place; None: that of the finding."""


class Diagnostic(msgspec.Struct, frozen=True, kw_only=True):
    """One finding with its stable code (`RHP…`)."""

    code: str
    message: str
    span: Span
    severity: Severity = Severity.ERROR
    related: tuple[Related, ...] = ()
    hint: str | None = None


class FileFindings(msgspec.Struct, frozen=True, kw_only=True):
    """All findings about one file: what the output formats take."""

    path: str
    """As it is to be shown; relative to the working directory where it lies below it."""
    text: str
    """With newlines as `\\n` (`resihp.ir.parser.normalise`)."""
    diagnostics: tuple[Diagnostic, ...]
