"""One line as data: by its canonical spelling or, where it has another, by the grammar.

Comments and the number of blanks are no matter of spelling. The grammar decides what a line is;
loading it takes longer than reading most texts, so that is left until a line needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.ir import canonical, canonical_statements
from resihp.ir.lines import Budget, code_of, squeeze

if TYPE_CHECKING:
    from resihp.ir.model import Instr, Source
    from resihp.ir.statements import ProgramLine, Statement

__all__ = ["read_instruction", "read_program_line", "read_source", "read_statement"]


def read_statement(head: str, column: int, budget: Budget) -> Statement:
    """The statement of a line outside of blocks, which starts at `column`.

    Raises `LineError` if it is none, as all functions here do.
    """
    known = canonical_statements.read_statement(head, budget)
    if known is None and (tidy := squeeze(head)) != head:
        known = canonical_statements.read_statement(tidy, budget)
    if known is not None:
        return known
    from resihp.ir.syntax import read_statement

    return read_statement(" " * (column - 1) + head, budget)


def read_source(line: str, budget: Budget) -> Source | None:
    """The line of a `reconfigure` block; None if it says nothing."""
    code = code_of(line)
    words = squeeze(code)
    known = canonical.read_source(f"  {words}")
    if known is not None or not words:
        return known
    from resihp.ir.syntax import read_source

    return read_source(code, budget)


def read_instruction(line: str) -> tuple[Instr, ...]:
    """The instruction of a line of a `stream` block, both of a pair; empty if it says nothing."""
    code = code_of(line)
    words = squeeze(code)
    known = canonical.read_instruction(f"  {words}") if words else ()
    if known is not None:
        return known
    from resihp.ir.syntax import read_instruction

    return read_instruction(code)


def read_program_line(line: str) -> tuple[ProgramLine, ...]:
    """The instruction of a line of a `run` block, both of a pair; empty if it says nothing."""
    code = code_of(line)
    words = squeeze(code)
    known = canonical.read_program_line(f"  {words}") if words else ()
    if known is not None:
        return known
    from resihp.ir.syntax import read_program_line

    return read_program_line(code)
