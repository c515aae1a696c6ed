"""Which version of the state all survivors continue from (DESIGN §6).

A vote is complete on a rank only when every member contributed, and a member contributes only
once its reduced gradients are complete. So whoever saw the vote of a step proves that all
members can roll forward over it, and the newest such version has a source everywhere. A rank
that is lost may have said so before: what was reported as committed is never taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from resihp.wire.messages import Joined, Settled, StepRecord

__all__ = ["Settlement", "differing_shards", "newest_version"]


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """The version to continue from, applied updates by then, and the record of its last step."""

    version: int
    updates: int
    record: StepRecord | None


def newest_version(states: Iterable[Settled], reported: StepRecord | None) -> Settlement:
    """The newest version that every survivor holds or can roll forward to.

    `reported` is the newest step that any rank, lost or not, reported as committed.
    """
    newest = max(states, key=lambda state: (max(state.version, state.voted), state.version))
    version, record = max(newest.version, newest.voted), newest.record
    if reported is not None and reported.step == version:
        version, record = version + 1, reported
    assert version <= newest.version + 1, "a vote was complete without the state before it"
    rolls_forward = version > newest.version
    skipped = record is not None and record.skipped
    updates = newest.updates + (1 if rolls_forward and not skipped else 0)
    return Settlement(version=version, updates=updates, record=record)


def differing_shards(joined: Mapping[int, Joined]) -> str:
    """The first shard whose replicas have different digests, '' where all agree."""
    seen: dict[str, tuple[int, str]] = {}
    for rank, message in sorted(joined.items()):
        for shard, digest in message.hashes.items():
            first = seen.setdefault(shard, (rank, digest))
            if first[1] != digest:
                return f"{shard} on ranks {first[0]} and {rank}"
    return ""
