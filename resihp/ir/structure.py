"""Lines and blocks of a text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from resihp.ir.lines import BLANKS

if TYPE_CHECKING:
    from resihp.ir.diagnostics import Diagnostic

__all__ = ["Block", "split", "split_tidy"]


class Block(NamedTuple):
    """A line outside blocks, with the block that it opens."""

    line: int
    column: int
    head: str
    """Text of the head from `column` on, without its comment and `{`."""
    body_line: int
    body: str | None
    """Text between the braces; None where the line opens no block."""


def split(text: str) -> tuple[list[Block], list[Diagnostic]]:
    """The lines and blocks of `text`, and the faults of its block structure."""
    blocks = split_tidy(text)
    if blocks is not None:
        return blocks, []
    from resihp.ir.structure_grammar import split_by_grammar

    return split_by_grammar(text)


# A line outside of blocks, with its block if that has no comments and its braces stand right.
_TIDY = re.compile(
    r"([ \t]*)([^ \t\n{}#][^{}#\n]*)?(?:\{((?:\n[^{}#]*)?\n)\}[ \t]*)?(?:#[^\n]*)?(?:\n|\Z)"
).match


def split_tidy(text: str) -> list[Block] | None:
    """The lines and blocks of a text that has nothing unusual; None says nothing about it.

    Gives what the grammar gives, ten times as fast.
    """
    blocks: list[Block] = []
    at, line, size = 0, 1, len(text)
    while at < size:
        found = _TIDY(text, at)
        if found is None:
            return None
        indent, head, body = found.groups()
        if head is not None:
            tidy = head.rstrip(BLANKS)
            blocks.append(Block(line, len(indent) + 1, tidy, line, body))
        elif body is not None:
            return None
        line += 1 if body is None else 1 + body.count("\n")
        at = found.end()
    return blocks
