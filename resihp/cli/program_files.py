"""Programs on the command line: which files hold them, and what is wrong with them together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resihp.ir.diagnostics import FileFindings

__all__ = ["is_program", "verify_program_files"]


def is_program(text: str) -> bool:
    """Whether a text starts as a program does."""
    from resihp.ir.header import Header, read_header
    from resihp.ir.model import Level
    from resihp.ir.reader import normalise

    header = read_header(normalise(text))
    return isinstance(header, Header) and header.level is Level.PROGRAM


def verify_program_files(
    files: Sequence[tuple[str, str]], transport: str | None
) -> list[FileFindings]:
    """Findings about files of programs, given as (name in the output, text).

    All programs are those of one job. Where a file cannot be read, each other one is verified for
    itself.
    """
    from resihp.errors import PlanSyntaxError
    from resihp.ir.diagnostics import Diagnostic, FileFindings
    from resihp.ir.program_text import parse_programs
    from resihp.ir.reader import normalise
    from resihp.ir.source import ParsedProgram
    from resihp.ir.verify.programs import verify_programs

    parsed: list[tuple[ParsedProgram, ...]] = []
    found: list[Sequence[Diagnostic]] = []
    for path, text in files:
        try:
            parsed.append(parse_programs(text, path=path))
            found.append(())
        except PlanSyntaxError as error:
            parsed.append(())
            found.append(error.diagnostics)
    if all(parsed):
        found = [*verify_programs(parsed, transport=transport)] if parsed else []
    else:
        for index, programs in enumerate(parsed):
            if programs:
                (found[index],) = verify_programs([programs], transport=transport)
    return [
        FileFindings(path=path, text=normalise(text), diagnostics=tuple(findings))
        for (path, text), findings in zip(files, found, strict=True)
    ]
