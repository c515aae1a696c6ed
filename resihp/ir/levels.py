"""The words of the language, and which of them belong to which level."""

from __future__ import annotations

from resihp.ir.model import Level, Op

__all__ = [
    "BODY_WORDS",
    "SOURCE_WORDS",
    "STATEMENT_WORDS",
    "misplaced_instruction",
    "misplaced_statement",
    "place_of",
]

BODY_WORDS = {op.mnemonic: op for op in Op}
"""First words of the lines of `stream` and `run` blocks."""
SOURCE_WORDS = ("reshard", "move", "restore", "load")
"""First words of the lines of the `reconfigure` block."""

_EVERYWHERE = (*Level, "model", "mesh", "batch", "precision", "recompute")
_OF_A_PROGRAM = ("rank", "run")
_OF_A_PLAN = (
    "order",
    "memory",
    "transport",
    "resume",
    "group",
    "standby",
    "lost",
    "returned",
    "reconfigure",
    "stream",
)
STATEMENT_WORDS = (*_EVERYWHERE, *_OF_A_PLAN, *_OF_A_PROGRAM)
"""First words of the lines outside of blocks."""


def misplaced_statement(level: Level, word: str) -> str | None:
    """Where the statement `word` belongs instead, if not into a text of `level`."""
    if level is Level.PROGRAM and word in _OF_A_PLAN:
        return "a program says what one rank runs; the whole plan starts with `plan 1`"
    if level is not Level.PROGRAM and word in _OF_A_PROGRAM:
        return "it belongs in the program of one rank, which starts with `program 1`"
    return None


def misplaced_instruction(level: Level, op: Op) -> str | None:
    """Where an instruction belongs instead, if not into a text of `level`."""
    if level is Level.SCHEDULE and not op.is_compute:
        return "a schedule has only F, B, W and BW; `resihp lower` makes the plan with the rest"
    return None


def place_of(word: str) -> str | None:
    """Where in a text a word belongs, as a hint; None for a word that the language lacks."""
    if word in BODY_WORDS:
        return f"`{word}` is an instruction; it belongs inside a `stream` block"
    if word in SOURCE_WORDS:
        return f"`{word}` belongs inside the `reconfigure` block"
    if word in STATEMENT_WORDS:
        return f"`{word}` belongs outside the block; is a `}}` missing above?"
    return None
