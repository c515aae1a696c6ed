"""A plan as if it had been read from a text in which everything has a line of its own."""

from __future__ import annotations

from itertools import count

from resihp.ir.diagnostics import Span
from resihp.ir.model import Plan
from resihp.ir.source import BodyPlaces, Parsed, StreamSource

__all__ = ["placed"]


def placed(plan: Plan) -> Parsed:
    """For checks that need places but no words. The lines are blank."""
    numbers = count(1)

    def line() -> Span:
        return Span(next(numbers), 1, 2)

    statements = {
        word: line()
        for word in ("plan", "model", "mesh", "batch", "resume", "standby", "lost", "reconfigure")
    }
    groups = tuple(line() for _ in plan.groups)
    reconfigure = tuple(line() for _ in plan.reconfigure)
    streams: list[StreamSource] = []
    for stream in plan.streams:
        head = line()
        body = BodyPlaces("\n" + "x\n" * len(stream.body))
        streams.append(StreamSource(head=head, body_line=head.line, body=body))
        for _ in stream.body:
            line()
    return Parsed(
        plan=plan,
        text="\n" * next(numbers),
        path=None,
        statements=statements,
        groups=groups,
        reconfigure=reconfigure,
        streams=tuple(streams),
    )
