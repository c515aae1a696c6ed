"""The first line of a text: which level it has, and whether this program knows its version."""

from __future__ import annotations

import re
from typing import NamedTuple

from resihp.ir.diagnostics import Diagnostic, Span
from resihp.ir.lines import BLANKS, code_of, did_you_mean, quote
from resihp.ir.model import FORMAT_VERSION, Level

__all__ = ["Header", "read_header"]

_VERSION = re.compile(r"([A-Za-z]+)[ \t]+([0-9]+)")
_STARTS = ", ".join(f"`{level} {FORMAT_VERSION}`" for level in Level)
_CSV_CELL = re.compile(r"[0-9]+(?:[FBIW]|BW|SEND_[FB]|RECV_[FB]|UNSHARD)[0-9]*(?:,|$)")


class Header(NamedTuple):
    """What the first line says, and where it stands."""

    level: Level
    span: Span


def read_header(text: str, levels: tuple[Level, ...] = tuple(Level)) -> Header | Diagnostic:
    """The header of `text` (newlines as `\\n`), or why it is not of one of `levels`."""
    found = _first_line(text)
    if found is None:
        message = f"the text is empty; {_wanted(levels)}"
        return Diagnostic(code="RHP002", message=message, span=Span(1, 1, 2))
    code, span = found
    version = _VERSION.fullmatch(code)
    if version is None or version[1] not in tuple(Level):
        return Diagnostic(code="RHP002", message=_wanted(levels), span=span, hint=_hint(code))
    level = Level(version[1])
    if version[2] != str(FORMAT_VERSION):
        message = (
            f"this is a {level} of version {version[2][:20]}; this program reads version "
            f"{FORMAT_VERSION}"
        )
        return Diagnostic(code="RHP002", message=message, span=span)
    if level not in levels:
        message = f"this is a {level}; {_wanted(levels)}"
        return Diagnostic(code="RHP007", message=message, span=span)
    return Header(level, span)


def _first_line(text: str) -> tuple[str, Span] | None:
    """The first line that says something, without blanks around it, and its place."""
    for found in re.finditer(r"[^\n]+", text):
        code = code_of(found.group())
        if code.strip(BLANKS):
            line = text.count("\n", 0, found.start()) + 1
            column = len(code) - len(code.lstrip(BLANKS)) + 1
            return code.strip(BLANKS), Span(line, column, len(code) + 1)
    return None


def _wanted(levels: tuple[Level, ...]) -> str:
    wanted = next(level for level in (Level.PLAN, *Level) if level in levels)
    return f"a {wanted} starts with the line `{wanted} {FORMAT_VERSION}`"


def _hint(code: str) -> str:
    """What the author of a strange first line may have meant."""
    word = re.split(f"[{BLANKS}]", code)[0]
    if _CSV_CELL.match(code):
        return "is this a CSV file of torch? its name must end in `.csv`"
    near = did_you_mean(word, tuple(Level))
    if word in tuple(Level):
        return f"after `{word}` the line has the version, and nothing else: `{word} 1`"
    if near is not None:
        return near
    return f"the first line is one of {_STARTS}; found {quote(code)}"
