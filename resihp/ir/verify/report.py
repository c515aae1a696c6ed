"""Findings about instructions of lanes: where they stand and how they read."""

from __future__ import annotations

from resihp.ir.diagnostics import Related, Span
from resihp.ir.lanes import Lane
from resihp.ir.source import Parsed
from resihp.ir.verify.findings import Findings

__all__ = ["Report"]


class Report:
    """What the checks that look at lanes write to."""

    def __init__(self, parsed: Parsed, findings: Findings) -> None:
        self.parsed = parsed
        self.plan = parsed.plan
        self.findings = findings

    def span(self, lane: Lane, index: int) -> Span:
        """Place of an instruction."""
        return self.parsed.streams[lane.stream].span(index)

    def here(self, lane: Lane, index: int, what: str = "", *, of: bool = True) -> Related:
        """A note that an instruction, of which lane unless not `of`, is here, and `what`."""
        owner = f" of {lane.name}" if of else ""
        return Related(f"{lane.text(index)}{owner} is here{what}", self.span(lane, index))

    def add(
        self,
        code: str,
        lane: Lane,
        index: int,
        message: str,
        related: tuple[Related, ...] = (),
        hint: str | None = None,
    ) -> None:
        """Report `code` at an instruction."""
        self.findings.add(
            code,
            self.span(lane, index),
            message,
            related=related,
            hint=hint,
            replica=lane.name.replica,
        )
