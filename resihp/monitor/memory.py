"""What earlier coordinators of a job knew and no rank says again, as their events tell it. Pure.

Ranks say what they hold and do. What was made of it, how often a rank was started in vain say, only
events tell; a coordinator that takes over reads them, so that no rule begins anew with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from resihp.compiler.adaptation.hysteresis import Record
from resihp.monitor.incident import Incident

__all__ = ["Memory", "memory_of"]


@dataclass
class Memory:
    """Of one job; a coordinator that is the first has none."""

    incidents: list[Incident] = field(default_factory=list[Incident])
    num_plans: int = 0
    """Generations that ran."""
    executors: dict[int, int] = field(default_factory=dict[int, int])
    """Process number of the executor that each rank started last."""
    told_lost: set[int] = field(default_factory=set[int])
    """Ranks whose executor was told dead and that have not started one since."""
    starts: dict[int, int] = field(default_factory=dict[int, int])
    """How often each rank was started since it last took part in a step."""
    starting: set[int] = field(default_factory=set[int])
    """Ranks whose executor has started, and neither got ready nor ended."""
    returned: set[int] = field(default_factory=set[int])
    """Ranks that came back, and have not died again."""
    given_up: set[int] = field(default_factory=set[int])
    """Ranks that are not started any more, as was told."""
    trust: dict[int, Record] = field(default_factory=dict[int, Record])
    refused: set[str] = field(default_factory=set[str])
    """Saved versions that somebody found damaged."""


class _Event(msgspec.Struct):
    """All that is read of any event."""

    event: str
    at_s: float
    rank: int = -1
    ranks: tuple[int, ...] = ()
    pid: int = -1
    start: int = 0
    evidence: str = ""
    hit_s: float | None = None
    standby: bool = False
    relapses: int = 0
    good_since: int | None = None
    version: str | int = ""


def memory_of(rows: Iterable[bytes], step: int) -> Memory:
    """What the rows of `events.jsonl` tell; damaged ones are passed over.

    `step`: the one that comes next.
    """
    told = _Told()
    decoder = msgspec.json.Decoder(_Event, strict=False)
    for row in rows:
        with contextlib.suppress(msgspec.DecodeError):
            told.add(decoder.decode(row), row)
    return told.until(step)


class _Told:
    """Event by event."""

    def __init__(self) -> None:
        self._memory = Memory()
        self._open: list[_Event] = []
        """Losses that no incident tells yet."""
        self._ordered: dict[int, int] = {}
        """Starts that were ordered, counted with the order: they count once they are seen, since
        one that was not would be counted again where it comes later."""

    def add(self, event: _Event, row: bytes) -> None:
        memory, rank = self._memory, event.rank
        match event.event:
            case "running":
                memory.num_plans += 1
            case "incident":
                memory.incidents.append(msgspec.json.decode(row, type=Incident, strict=False))
                self._open.clear()
            case "version_refused":
                memory.refused.add(str(event.version))
            case "trust":
                memory.trust[rank] = Record(event.relapses, event.good_since)
            case "forgiven":
                memory.trust.pop(rank, None)
            case "took_part":
                for each in event.ranks:
                    memory.starts.pop(each, None)
                    memory.given_up.discard(each)
            case _:
                self._of_an_executor(event)

    def _of_an_executor(self, event: _Event) -> None:
        """Its start, its end, and whether it got ready between them."""
        memory, rank = self._memory, event.rank
        match event.event:
            case "respawn":
                self._ordered[rank] = event.start
            case "executor_started":
                memory.executors[rank] = event.pid
                memory.told_lost.discard(rank)
                memory.returned.discard(rank)
                memory.starting.add(rank)
                if rank in self._ordered:
                    memory.starts[rank] = self._ordered.pop(rank)
            case "start_counted":
                memory.starts[rank] = event.start
            case "rank_returned":
                memory.starting.discard(rank)
                memory.returned.add(rank)
            case "not_ready":
                memory.starting.discard(rank)
            case "given_up":
                memory.given_up.add(rank)
            case "rank_lost" | "died_again":
                memory.told_lost.add(rank)
                memory.starting.discard(rank)
                memory.returned.discard(rank)
                if event.event == "rank_lost" and not event.standby:
                    self._open.append(event)
            case _:
                pass

    def until(self, step: int) -> Memory:
        """All of it; an incident that is open is of `step`."""
        if self._open:
            first = self._open[0]
            self._memory.incidents.append(
                Incident(
                    ranks=[event.rank for event in self._open],
                    evidence="; ".join(event.evidence for event in self._open),
                    detected_s=first.at_s,
                    step=step,
                    hit_s=first.hit_s,
                )
            )
        return self._memory
