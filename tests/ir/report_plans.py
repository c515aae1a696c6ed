"""Plans as short as a report: streams on a line each, findings by code, stream and instruction."""

from __future__ import annotations

import re
from collections.abc import Sequence

from resihp.compiler.facts import facts_of
from resihp.errors import PlanSyntaxError
from resihp.ir.facts import Facts
from resihp.ir.model import Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.source import Parsed
from resihp.ir.verify import verify

__all__ = ["END", "edit", "ends", "found", "hints", "plan_text", "written"]

END = "; reduce_grads; step"


def ends(*stages: int) -> str:
    """What a stream of several stages ends with."""
    return "".join(f"; reduce_grads[{stage}]" for stage in stages) + "; step"


def plan_text(
    *streams: str,
    layers: Sequence[str] = (),
    ranks: Sequence[str] = (),
    dp: int = 1,
    tp: int = 1,
    microbatches: int = 2,
    tokens: int = 16,
    num_layers: int = 8,
    lines: Sequence[str] = (),
    level: str = "plan",
) -> str:
    """A plan of `len(streams) / dp` positions; its streams position by position, then by replica.

    `layers` are those of each position (an even cut where not given), `ranks` those of each
    group (one each where not given); an empty stream leaves the group out. `lines` follow the
    batch line.
    """
    pp = len(streams) // dp
    share = num_layers // pp
    layers = layers or [f"{pos * share}..{(pos + 1) * share - 1}" for pos in range(pp)]
    ranks = ranks or [str(number) for number in range(len(streams))]
    names = [(replica, pos) for replica in range(dp) for pos in range(pp)]
    parts = [
        f"{level} 1",
        f"model tiny layers={num_layers} hidden=64 heads=8 kv_heads=4 ffn=96 vocab=128",
        f"mesh tp={tp} pp={pp} dp={dp}",
        f"batch microbatches={microbatches} tokens={tokens}",
        *lines,
    ]
    parts += [
        f"group dp{replica}.pp{pos} ranks={held} layers={layers[pos]}"
        for (replica, pos), held, stream in zip(names, ranks, streams, strict=True)
        if stream
    ]
    for (replica, pos), stream in zip(names, streams, strict=True):
        if stream:
            body = "\n".join(f"  {instr.strip()}" for instr in stream.split(";"))
            parts.append(f"stream dp={replica} pp={pos} {{\n{body}\n}}")
    return "\n".join(parts) + "\n"


def edit(text: str, *edits: tuple[str, str]) -> str:
    """`text` with each `a; b` in it replaced, once."""
    for before, after in edits:
        old, new = (
            "".join(f"  {i.strip()}\n" for i in part.split(";") if i) for part in (before, after)
        )
        assert text.count(old) == 1, (before, text.count(old))
        text = text.replace(old, new)
    return text


def found(
    text: str, *, transport: str | None = None, facts: Facts | None = None
) -> list[tuple[str, str]]:
    """(code, place) of every finding; a place is `dp0.pp1: F 3`, or a line outside of streams."""
    try:
        findings = verify(parse(text), transport=transport, facts=facts or facts_of)
    except PlanSyntaxError as error:
        findings = list(error.diagnostics)
    lines = text.split("\n")
    return [(finding.code, _place(lines, finding.span.line)) for finding in findings]


def _place(lines: Sequence[str], number: int) -> str:
    line = lines[number - 1]
    if not line.startswith("  "):
        return line
    head = next(line for line in reversed(lines[:number]) if line.startswith("stream"))
    replica, pos = re.findall(r"=(\S+)", head)
    return f"dp{replica}.pp{pos}: {line.strip()}"


def hints(text: str) -> list[str | None]:
    """The hint of every finding."""
    return [finding.hint for finding in verify(parse(text))]


def written(plan: Plan) -> Parsed | None:
    """As read from its text; None where three instructions are overlapped, which has none."""
    try:
        return parse(print_plan(plan))
    except PlanSyntaxError:
        return None
