"""A coordinator that leads: has its entries accepted, one after the other. Pure."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from resihp.monitor.quorum.majority import is_quorum
from resihp.wire.quorum import Accepted, Entry, Propose

__all__ = ["Leader"]


class Leader:
    """Of one term. Made when the campaign is won, with the newest entry that it found."""

    def __init__(
        self, term: int, candidate: str, newest: Entry | None, nodes: Collection[int]
    ) -> None:
        self.term = term
        self._candidate = candidate
        self.decided: Entry | None = None
        """The newest entry that a quorum accepted under this term."""
        self.proposed: Entry | None = None
        """The newest that this term proposed."""
        self._first_electors = tuple(sorted(nodes))
        self._accepted: set[int] = set()
        if newest is not None:
            self.proposed = msgspec.structs.replace(newest, term=term)
        self.is_ready = newest is None
        """Whether what was found is decided; before that nothing new may be proposed."""

    @property
    def electors(self) -> tuple[int, ...]:
        """Who decides on the next entry."""
        return self._first_electors if self.decided is None else self.decided.voters

    @property
    def proposal(self) -> Propose | None:
        """What each monitor is asked, and asked again when it comes back."""
        if self.proposed is None:
            return None
        return Propose(entry=self.proposed, candidate=self._candidate)

    def propose(self, entry: Entry) -> None:
        """The next entry; one that was not decided yet is given up.

        It keeps the electors of that one: whichever of the two a quorum of them accepted last
        is what a later coordinator finds.
        """
        assert self.is_ready, "the entry found is not decided"
        before = self.proposed
        assert before is None or entry.generation > before.generation
        self.proposed = msgspec.structs.replace(entry, term=self.term, electors=self.electors)
        self._accepted.clear()

    def accepted(self, node: int, message: Accepted) -> bool:
        """An answer; whether the entry proposed last is decided by it."""
        entry = self.proposed
        if entry is None or (message.term, message.generation) != entry.age:
            return False
        self._accepted.add(node)
        if self.decided is entry or not is_quorum(self._accepted, entry.electors):
            return False
        self.decided = entry
        self.is_ready = True
        return True
