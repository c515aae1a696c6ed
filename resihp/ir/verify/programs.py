"""The verifier of programs: one alone, or all of a job together."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.ir.diagnostics import Diagnostic
from resihp.ir.source import ParsedProgram
from resihp.ir.transport import parse_transport
from resihp.ir.verify.findings import Findings
from resihp.ir.verify.programs_alone import check_alone
from resihp.ir.verify.programs_head import check_head
from resihp.ir.verify.programs_places import Files
from resihp.ir.verify.programs_set import check_set

__all__ = ["verify_programs"]


def verify_programs(
    files: Sequence[Sequence[ParsedProgram]], *, transport: str | None = None
) -> list[list[Diagnostic]]:
    """Every finding about the programs of some files, one list per file.

    One program is verified alone: its order, what it needs and owes, its chunks. Several are
    verified as all the programs of one job, as their plan would be, with progress under
    `transport` (None: `edge`); and every message must be the same at both ends.

    Raises `UserError` for an unknown transport.
    """
    if transport is not None:
        parse_transport(transport)
    joined, findings = Files(files), Findings()
    for parsed in joined.programs:
        check_head(parsed, findings)
    if len(findings):
        found = findings.sorted()
    elif len(joined.programs) == 1:
        check_alone(joined, joined.programs[0], findings)
        found = findings.sorted()
    else:
        found = check_set(joined, findings, transport)
    return joined.by_file(found)
