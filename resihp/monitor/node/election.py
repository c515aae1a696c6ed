"""What this node promised and accepted, in its journal, and whether it is led."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from resihp.monitor.node.brief import Brief
from resihp.monitor.quorum.acceptor import Kept, answer_lead, answer_propose, obeys
from resihp.monitor.quorum.journal import read_journal, write_journal
from resihp.monitor.quorum.watch import Watch
from resihp.wire.quorum import Accepted, Lead, Promise, Propose, Superseded
from resihp.wire.timing import Timing

__all__ = ["Election"]


class Election:
    """Of one node. Nothing is answered before `open`."""

    def __init__(self, brief: Brief, timing: Timing, now_s: float) -> None:
        self.watch = Watch(brief.node, len(brief.addresses), timing, now_s)
        self._kept = Kept()
        self._path: Path | None = None
        self.is_written = False
        """Whether there is a journal: one that is gone later is missed."""
        self._one_by_one = asyncio.Lock()
        self.trouble = ""
        """Why the journal cannot be written; empty: it can, as far as is known."""
        self.trouble_since_s = math.inf

    @property
    def is_open(self) -> bool:
        """Whether the journal is known."""
        return self._path is not None

    @property
    def promised(self) -> int:
        """The newest term that was promised."""
        return self._kept.promised

    def open(self, path: Path, *, was_written: bool) -> None:
        """Read the journal at `path`, once. JournalDamaged where it is not whole, or is gone though
        an earlier monitor of this node had written it."""
        if self._path is None:
            self._kept = read_journal(path, was_written=was_written)
            self._path = path

    def obeys(self, term: int) -> bool:
        """Whether orders of the coordinator of `term` are followed."""
        return obeys(self._kept, term)

    async def answer(
        self, message: Lead | Propose, now_s: float
    ) -> Promise | Accepted | Superseded:
        """The answer, once what it depends on is on the disk. OSError where it cannot be."""
        assert self._path is not None
        async with self._one_by_one:
            if isinstance(message, Lead):
                answer = answer_lead(self._kept, message, is_led=self.watch.is_led(now_s))
            else:
                answer = answer_propose(self._kept, message)
            if answer.kept != self._kept:
                await self._write(self._path, answer.kept, now_s)
                self._kept = answer.kept
            return answer.reply

    async def _write(self, path: Path, kept: Kept, now_s: float) -> None:
        try:
            await asyncio.to_thread(write_journal, path, kept)
        except OSError as error:
            self.trouble = f"its journal {path} cannot be written: {error.strerror}"
            self.trouble_since_s = min(self.trouble_since_s, now_s)
            raise
        self.is_written = True
        self.trouble, self.trouble_since_s = "", math.inf
