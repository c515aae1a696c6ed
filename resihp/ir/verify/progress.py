"""No deadlock: played as early as the transport allows, every stream reaches its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from resihp.ir.diagnostics import Diagnostic, Related, Span
from resihp.ir.lanes import Lane
from resihp.ir.model import GroupName
from resihp.ir.source import Parsed
from resihp.ir.timeline import UNIT_COST, Player
from resihp.ir.transfers import At
from resihp.ir.transport import Transport
from resihp.ir.verify.findings import Findings
from resihp.ir.verify.swaps import find_swap, streams_of
from resihp.ir.verify.waits import Link, circles

__all__ = ["check_progress"]

_MOST_SWAPS = 4
"""Circles of one plan for which a swap is looked for."""
_MOST_LOOKS_PER_SWAP = 50_000
_GENERAL_HINTS = {
    "edge": "a posted send never waits: move the awaited one, with the compute that makes it, "
    "before what it comes after",
    "pair": "both ranks of a pair must list all their transfers, in both directions, in the same "
    "order; a receive may be listed long before it is needed",
    "rank": "ranks must list the transfers between them in an order that all of them agree on; "
    "a receive may be listed long before it is needed",
    "eager": "post the receive before what it comes after, or allow a larger buffer",
}


def check_progress(
    parsed: Parsed,
    lanes: Mapping[GroupName, Lane],
    transport: Transport,
    boundary_bytes: Mapping[GroupName, int] | None,
    findings: Findings,
    verify: Callable[[Parsed], Sequence[Diagnostic]] | None,
) -> None:
    """RHP501, once for every circle of lanes that has no lane in common with a shorter one.

    `boundary_bytes` are the sizes that `eager` needs. `verify` judges plans with two instructions
    swapped; without it no swap is looked for.
    """

    def in_circles(lanes: Mapping[GroupName, Lane]) -> set[GroupName]:
        player = Player(lanes, UNIT_COST, transport, boundary_bytes)
        found = circles(player, player.run().stuck, _MOST_LOOKS_PER_SWAP)
        return {link.source.name for circle in found for link in circle}

    player = Player(lanes, UNIT_COST, transport, boundary_bytes)
    stuck = player.run().stuck
    found = list(circles(player, stuck))
    for number, circle in enumerate(found):
        hint = _GENERAL_HINTS[transport.kind]
        if verify is not None and number < _MOST_SWAPS:
            swap = find_swap(parsed, lanes, circle, in_circles, verify)
            if swap is not None:
                lane = next(lane for lane in lanes.values() if lane.stream == swap.stream)
                ends = (
                    f"{lane.text(at)} ({parsed.where(parsed.streams[lane.stream].span(at))})"
                    for at in swap[1:]
                )
                also = ", in each replica" if len(streams_of(parsed.plan, swap)) > 1 else ""
                hint = f"swap {' and '.join(ends)}{also}: the circle is gone"
        _report(parsed, lanes, transport, stuck, circle, hint, findings)


def _report(
    parsed: Parsed,
    lanes: Mapping[GroupName, Lane],
    transport: Transport,
    stuck: dict[GroupName, int],
    circle: list[Link],
    hint: str,
    findings: Findings,
) -> None:
    """Start at the first line of the text that takes part, then follow the circle."""

    def place(at: At) -> Span:
        return parsed.streams[lanes[at.name].stream].span(at.position)

    start = min(range(len(circle)), key=lambda i: (place(circle[i].source), circle[i].source))
    circle = circle[start:] + circle[:start]
    related: list[Related] = []
    for link in circle:
        source, awaited = link.source, link.awaited
        who = f"{source.name} waits"
        if stuck.get(source.name) != source.position:
            who = f"the queue of {source.name} waits"
        whose = "its " if awaited.name == source.name else ""
        owner = "" if whose else f" of {awaited.name}"
        what = f"{whose}{_text(lanes, awaited)}{owner} ({parsed.where(place(awaited))})"
        order = "is queued behind" if link.queued else "comes after"
        then = f"{order} {_text(lanes, link.target)} ({parsed.where(place(link.target))})"
        if lanes[awaited.name].head_of(awaited.position) == link.target.position:
            then = "waits itself"
        related.append(Related(f"{who} here for {what}, which {then}", place(source)))
    names = [circle[0].source.name]
    for link in circle:
        if link.target.name != names[-1]:
            names.append(link.target.name)
    chain = ", which waits for ".join(str(name) for name in names[1:])
    under = "" if transport.kind == "edge" else f" under transport `{transport}`"
    findings.add(
        "RHP501",
        place(circle[0].source),
        f"deadlock{under}: {names[0]} waits for {chain or 'itself'}",
        related=tuple(related),
        hint=hint,
        replica=names[0].replica,
    )


def _text(lanes: Mapping[GroupName, Lane], at: At) -> str:
    return lanes[at.name].text_of_pair(at.position)
