"""Memory of each group over time: the verifier's account of what is alive, laid on a timeline."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from resihp.ir.facts import Facts
from resihp.ir.lanes import Lane
from resihp.ir.model import GroupName
from resihp.ir.timeline import Timeline
from resihp.ir.verify.memory import Live, live_spans

__all__ = ["Curve", "memory_curves"]


class Curve(NamedTuple):
    """Bytes that one member of a group needs: `num_bytes[i]` from `times[i]` on.

    Several points of one time are what instructions need that take no time.
    """

    times: tuple[float, ...]
    num_bytes: tuple[int, ...]

    @property
    def state_bytes(self) -> int:
        """What is always there: parameters, moments, sums of gradients."""
        return self.num_bytes[0]

    @property
    def peak_bytes(self) -> int:
        """The most at any time."""
        return max(self.num_bytes)


def memory_curves(
    lanes: Mapping[GroupName, Lane],
    timeline: Timeline,
    facts: Facts,
    replicas: Collection[int] | None = None,
) -> dict[GroupName, Curve]:
    """The curve of every lane, or of those of some replicas.

    The peaks are those that the verifier checks (`resihp.ir.verify.memory`).
    """
    asked = {name for name in lanes if replicas is None or name.replica in replicas}
    around = _around(lanes, asked)
    # A buffer lives as long as the peers make it: these are looked at too.
    spans = live_spans({name: lanes[name] for name in lanes if name.replica in around}, facts)
    return {
        name: _curve(
            sum(stage.state_bytes for stage in facts.stages[name]),
            spans[name],
            timeline.starts[name],
            timeline.ends[name],
        )
        for name in lanes
        if name in asked
    }


def _around(lanes: Mapping[GroupName, Lane], names: Iterable[GroupName]) -> set[int]:
    """The replicas of these lanes and those that they send to or receive from."""
    found: set[int] = set()
    for name in names:
        found.add(name.replica)
        found.update(instr.peer for instr in lanes[name].body if instr.peer is not None)
    return found


def _curve(state_bytes: int, spans: list[Live], starts: list[float], ends: list[float]) -> Curve:
    """What lives is taken when its first instruction starts and given back when its last ends."""
    taken, given = [0] * len(ends), [0] * len(ends)
    for live in spans:
        if live.first < len(ends):
            taken[live.first] += live.num_bytes
            if live.last < len(ends):
                given[live.last] += live.num_bytes
    times, levels, level = [0.0], [state_bytes], state_bytes
    for index, end in enumerate(ends):
        for time, change in ((starts[index], taken[index]), (end, -given[index])):
            if change:
                level += change
                times.append(time)
                levels.append(level)
    return Curve(tuple(times), tuple(levels))
