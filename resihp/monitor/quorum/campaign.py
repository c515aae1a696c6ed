"""A coordinator on its way to the lead. Pure: answers of monitors in, a verdict out."""

from __future__ import annotations

import enum
from collections.abc import Collection

from resihp.monitor.quorum.majority import is_quorum
from resihp.wire.quorum import Entry, Promise, Superseded

__all__ = ["Campaign", "Standing"]


class Standing(enum.Enum):
    """Of a campaign."""

    OPEN = enum.auto()
    WON = enum.auto()
    BEATEN = enum.auto()
    """Some monitor promised this term, or a newer one, to somebody else: ask with a newer term."""


class Campaign:
    """For one term, among all nodes of the job."""

    def __init__(self, term: int, nodes: Collection[int], *, is_probe: bool = False) -> None:
        """`is_probe`: the same without consequences, to see whether it can be won."""
        self.term = term
        self.is_probe = is_probe
        self._nodes = frozenset(nodes)
        self._promises: dict[int, Promise] = {}
        self._highest = 0

    @property
    def promised(self) -> frozenset[int]:
        """Nodes that follow."""
        return frozenset(self._promises)

    @property
    def newest(self) -> Entry | None:
        """The newest entry of all answers. Whatever was decided before is this one or older."""
        entries = [each.entry for each in self._promises.values() if each.entry is not None]
        return max(entries, key=lambda entry: entry.age, default=None)

    @property
    def next_term(self) -> int:
        """A term that no monitor that answered has promised yet."""
        return max(self.term, self._highest) + 1

    def answer(self, node: int, message: Promise | Superseded) -> None:
        """What the monitor of `node` says."""
        if isinstance(message, Superseded):
            self._highest = max(self._highest, message.promised)
        elif (message.term, message.is_probe) == (self.term, self.is_probe):
            self._promises[node] = message

    @property
    def standing(self) -> Standing:
        """Won with a quorum of those who decided on the newest entry, and of its voters.

        The first keeps an entry from being decided behind our back for the same place, the second
        every later one.
        """
        if self._highest >= self.term:
            return Standing.BEATEN
        newest = self.newest
        electorates = (self._nodes,) if newest is None else (newest.electors, newest.voters)
        if all(is_quorum(self.promised, each) for each in electorates):
            return Standing.WON
        return Standing.OPEN
