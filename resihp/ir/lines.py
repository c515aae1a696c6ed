"""What reading one line needs whichever way it is read: its error, and bounds on numbers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = [
    "BLANKS",
    "MAX_ERRORS",
    "MAX_LISTED",
    "MAX_NUMBER",
    "Budget",
    "LineError",
    "code_of",
    "did_you_mean",
    "list_of",
    "quote",
    "squeeze",
]

MAX_ERRORS = 50
"""Faults of one text that are told."""
MAX_NUMBER = 10**9
MAX_LISTED = 1 << 22
"""Numbers that all lists of one text may hold together."""


BLANKS = " \t"
"""What may stand between words; other characters that look blank are faults."""


_BLANK = re.compile(f"[{BLANKS}]+")


class LineError(Exception):
    """Why a line cannot be read; columns count from 1."""

    def __init__(
        self,
        column: int,
        end_column: int,
        message: str,
        *,
        hint: str | None = None,
        code: str = "RHP001",
    ) -> None:
        super().__init__(message)
        self.column = column
        self.end_column = max(end_column, column + 1)
        self.message = message
        self.hint = hint
        self.code = code


class Budget:
    """How many numbers the lists of one text may still hold."""

    def __init__(self, numbers: int = MAX_LISTED) -> None:
        self.numbers = numbers


def code_of(line: str) -> str:
    """The line without its comment and trailing blanks."""
    return line.partition("#")[0].rstrip(BLANKS)


def squeeze(code: str) -> str:
    """The words of a line with one blank between them."""
    return _BLANK.sub(" ", code).strip(" ")


def quote(text: str) -> str:
    """`text` for a message: at most 40 characters, unprintable ones escaped."""
    short = text if len(text) <= 40 else text[:37] + "..."
    return "`" + "".join(c if c.isprintable() else repr(c)[1:-1] for c in short) + "`"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """The known word that is nearest to `word`, as a hint; None if none is near."""
    spelled = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word[:40].lower(), spelled, n=1, cutoff=0.6)
    return f"did you mean `{spelled[near[0]]}`?" if near else None


def list_of(known: Iterable[str]) -> str:
    """All known words, as a hint."""
    return "one of " + ", ".join(f"`{word}`" for word in known)
