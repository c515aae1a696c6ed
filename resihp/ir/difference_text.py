"""The difference of two plans as a page to read, or as one JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from resihp.ir.difference import (
    CutChange,
    Difference,
    FieldChange,
    GroupChange,
    GroupState,
    MicroBatchMove,
    OrderChange,
    Position,
    RankMove,
    SourceChange,
)
from resihp.ir.measures import Measures, Peak, StateMove
from resihp.ir.statements import spell_numbers
from resihp.ir.verify.memory import readable_bytes

__all__ = ["Comparison", "render_json", "render_text"]

_SHOWN = 30
"""Lines of one section of the page; the JSON document has all."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What changed, and what it costs where both plans are right."""

    before: str
    """Name of the old plan's file."""
    after: str
    changes: Difference
    measures_before: Measures | None
    """None for a plan with errors."""
    measures_after: Measures | None
    state_moves: tuple[StateMove, ...] | None
    """None where the new plan does not follow the old one."""
    notes: tuple[str, ...] = ()
    """Why something is left out."""


def render_json(comparison: Comparison) -> str:
    """All of it, for programs."""
    return msgspec.json.format(msgspec.json.encode(comparison), indent=2).decode() + "\n"


def render_text(comparison: Comparison) -> str:
    """The page: a section per kind of change, then state, time and memory."""
    changes = comparison.changes
    title = f"{comparison.before} -> {comparison.after}"
    if changes.is_empty:
        return f"{title}: the same meaning\n"
    sections = {
        "job": [_field(change) for change in changes.fields],
        "groups": [_group(change) for change in changes.groups],
        "ranks": [_rank(move) for move in changes.ranks],
        "micro-batches": [_micro_batch(move) for move in changes.micro_batches],
        "order": [_order(change) for change in changes.order],
        "transfers": [_cut(change) for change in changes.transfers],
        "reconfigure": [_source(change) for change in changes.sources],
        "state to move": list(_state(comparison.state_moves or ())),
        "time": list(_time(comparison.measures_before, comparison.measures_after)),
        "memory": list(_memory(comparison.measures_before, comparison.measures_after)),
    }
    parts = [f"{title}\n"]
    parts += [_section(title, lines) for title, lines in sections.items() if lines]
    parts += [f"note: {note}\n" for note in comparison.notes]
    return "\n".join(parts)


def _section(title: str, lines: Sequence[str]) -> str:
    shown = [f"  {line}\n" for line in lines[:_SHOWN]]
    if len(lines) > _SHOWN:
        shown.append(f"  ... and {len(lines) - _SHOWN} more\n")
    return f"{title}\n{''.join(shown)}"


def _field(change: FieldChange) -> str:
    before, after = change.before or "not given", change.after or "not given"
    return f"{change.field}: {before} -> {after}"


def _group(change: GroupChange) -> str:
    before, after = change.before, change.after
    if before is None:
        assert after is not None
        return f"{change.group} is new: {_state_of(after)}"
    if after is None:
        return f"{change.group} is gone: {_state_of(before)}"
    parts: list[str] = []
    if before.tp != after.tp:
        parts.append(f"TP {before.tp} -> {after.tp}")
    if before.ranks != after.ranks:
        parts.append(f"ranks {spell_numbers(before.ranks)} -> {spell_numbers(after.ranks)}")
    if before.layers != after.layers:
        parts.append(f"layers {before.layers} -> {after.layers}")
    return f"{change.group}: {', '.join(parts)}"


def _state_of(state: GroupState) -> str:
    return f"TP {state.tp}, ranks {spell_numbers(state.ranks)}, layers {state.layers}"


def _rank(move: RankMove) -> str:
    plural = "s" if len(move.ranks) > 1 else ""
    return f"rank{plural} {spell_numbers(move.ranks)}: {move.before} -> {move.after}"


def _micro_batch(move: MicroBatchMove) -> str:
    before = "no replica" if move.before is None else f"replica {move.before}"
    after = "no replica" if move.after is None else f"replica {move.after}"
    plural = "s" if len(move.stages) > 1 else ""
    return (
        f"{spell_numbers(move.microbatches)} of replica {move.home}: {before} -> {after} "
        f"(stage{plural} {spell_numbers(move.stages)})"
    )


def _order(change: OrderChange) -> str:
    counts = [
        f"{number} {word}"
        for number, word in ((change.num_removed, "removed"), (change.num_added, "added"))
        if number
    ]
    what = ", ".join(counts) or "same instructions in another order"
    return (
        f"dp{spell_numbers(change.replicas)}.pp{change.pp}: "
        f"{_position(change.before)} -> {_position(change.after)}; {what}"
    )


def _position(position: Position | None) -> str:
    if position is None:
        return "the end"
    return f"`{position.instr}` (#{position.index}, line {position.line})"


def _cut(change: CutChange) -> str:
    plural = "s" if change.num_transfers > 1 else ""
    how = "scattered" if change.scattered else "whole"
    return (
        f"{change.sender} -> {change.receiver}: {change.num_transfers} {change.what}{plural} "
        f"now cross{'' if plural else 'es'} {how}"
    )


def _source(change: SourceChange) -> str:
    return f"{'+' if change.added else '-'} {change.line}"


def _state(moves: Sequence[StateMove]) -> Iterator[str]:
    if moves:
        total = sum(move.num_bytes for move in moves)
        num_pairs = sum(move.source is not None for move in moves)
        pairs = "1 pair" if num_pairs == 1 else f"{num_pairs} pairs"
        yield f"{readable_bytes(total)} in all, between {pairs} of ranks"
    for move in moves:
        source = "saved version" if move.source is None else f"rank {move.source}"
        yield f"{source} -> rank {move.target}: {readable_bytes(move.num_bytes)}"


def _time(before: Measures | None, after: Measures | None) -> Iterator[str]:
    if before is None or after is None:
        return
    share = f" ({after.makespan / before.makespan - 1:+.1%})" if before.makespan else ""
    yield (
        f"{before.makespan:g} -> {after.makespan:g} units{share}; F, B and W take one, BW two, "
        "at any TP degree"
    )
    yield f"idle {before.idle:.1%} -> {after.idle:.1%}"


def _memory(before: Measures | None, after: Measures | None) -> Iterator[str]:
    if before is None or after is None or (before.peak is None and after.peak is None):
        return
    yield f"peak {_peak(before.peak)} -> {_peak(after.peak)}"


def _peak(peak: Peak | None) -> str:
    if peak is None:
        return "(no capacity given)"
    capacity = readable_bytes(peak.capacity_bytes)
    return f"{readable_bytes(peak.num_bytes)} of {capacity} on {peak.group}"
