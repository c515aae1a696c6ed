"""How a monitor answers coordinators that want to lead or to decide. Pure.

What an answer depends on must outlive the monitor: the shell writes `Answer.kept` to the node's
journal, to the disk, before it sends `Answer.reply`.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from resihp.wire.quorum import Accepted, Entry, Lead, Promise, Propose, Superseded

__all__ = ["Answer", "Kept", "answer_lead", "answer_propose", "obeys"]


class Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a node knows of elections; it is in the journal."""

    promised: int = 0
    """The newest term that was promised; orders of older ones are refused."""
    candidate: str = ""
    """To whom."""
    entry: Entry | None = None
    """The newest that was accepted."""


class Answer(NamedTuple):
    """`kept` comes first, then the reply."""

    kept: Kept
    reply: Promise | Accepted | Superseded


def answer_lead(kept: Kept, message: Lead, *, is_led: bool) -> Answer:
    """Promise the term if it is newer than any before.

    `is_led`: the coordinator that has our promise was heard just now. Then nobody else gets one, so
    that a node that is cut off on one side only does not take the lead from one who serves all.
    """
    promise = Promise(
        term=message.term, entry=kept.entry, is_probe=message.is_probe, number=message.number
    )
    is_same = (message.term, message.candidate) == (kept.promised, kept.candidate)
    if not is_same:
        if message.term <= kept.promised or is_led:
            return Answer(kept, Superseded(promised=kept.promised, is_led=is_led))
        if not message.is_probe:
            kept = msgspec.structs.replace(kept, promised=message.term, candidate=message.candidate)
    return Answer(kept, promise)


def answer_propose(kept: Kept, message: Propose) -> Answer:
    """Accept an entry unless a newer term is promised or a newer entry is here."""
    entry = message.entry
    if entry.term < kept.promised:
        return Answer(kept, Superseded(promised=kept.promised, is_led=False))
    # Whoever proposes has the promises of a quorum, so nobody else leads under this term.
    kept = msgspec.structs.replace(kept, promised=entry.term, candidate=message.candidate)
    if kept.entry is None or kept.entry.age < entry.age:
        kept = msgspec.structs.replace(kept, entry=entry)
    return Answer(kept, Accepted(term=entry.term, generation=entry.generation))


def obeys(kept: Kept, term: int) -> bool:
    """Whether orders of the coordinator of `term` are followed."""
    return term == kept.promised
