"""Which version of the state all survivors continue from (DESIGN §6).

A vote is complete on a rank only when every member contributed, and a member contributes only
once its reduced gradients are complete. So whoever saw the vote of a step proves that all
members can roll forward over it, and the newest such version has a source on every survivor. A
rank that is lost may have said so before: what was reported as committed is not taken back while
the survivors hold all of it.

Where the last holder of a shard is lost, its snapshot is the source: then everybody goes to the
newest version of which every shard has a live holder or a sealed snapshot that somebody alive can
read. A rank contributes to a vote only once its snapshot of the version before is sealed, so that
is at most one step back where every step is kept. Where all members were started again, it is the
version that most of them can begin from.

A rank that is cut off may see a vote complete, and seal what follows, after the others went on
without that step. So a snapshot counts only up to what its generation can have committed: what live
holders and records know, and nothing beyond the version that a later generation was begun with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from resihp.ir.model import Plan
from resihp.ir.reshard import chunks_of_member, layers_of
from resihp.wire.messages import Joined, Settled, StepRecord

__all__ = ["Settlement", "differing_shards", "newest_version", "settle"]


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """The version to continue from, applied updates by then, and the record of its last step."""

    version: int
    updates: int
    record: StepRecord | None
    snapshots: Mapping[int, tuple[int, ...]] = {}
    """Of members that do not hold this version themselves: the live ranks that can read a
    snapshot of theirs."""
    empty: tuple[int, ...] = ()
    """Live members that were started again and have no snapshot of this version."""


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


def settle(
    base: int,
    plan: Plan,
    settled: Mapping[int, Settled],
    records: Sequence[StepRecord],
    last: int | None = None,
) -> Settlement | None:
    """The newest version of the layout `base`, which is that of `plan`, with all its sources.

    `settled` is of all live ranks, `records` of all committed steps; `last` is the version that a
    later generation was to begin with, where one was. None where some shard has no source at any
    version: then a checkpoint is what is left.
    """
    told = _Told(base, plan, settled)
    newest = None
    if told.live:
        newest = newest_version(told.live.values(), records[-1] if records else None)
    for version in told.in_order(newest, last):
        holders = told.holders(version, newest)
        if holders is None:
            continue
        snapshots = told.snapshots(version, holders)
        if not _covers(plan, holders | snapshots.keys()):
            continue
        if newest is None or version != newest.version:
            record = records[version - 1] if 0 < version <= len(records) else None
            newest = Settlement(version=version, updates=told.updates(version), record=record)
        empty = tuple(sorted(told.again.keys() - holders))
        return msgspec.structs.replace(newest, snapshots=snapshots, empty=empty)
    return None


class _Told:
    """What live ranks said of the layout `base`."""

    def __init__(self, base: int, plan: Plan, settled: Mapping[int, Settled]) -> None:
        self._members = frozenset(plan.active_ranks)
        members = {rank: state for rank, state in settled.items() if rank in self._members}
        self.live = {rank: state for rank, state in members.items() if base in state.layouts}
        """Members that hold the layout in memory."""
        self.again = {rank: state for rank, state in members.items() if rank not in self.live}
        """Members that were started again and hold nothing but their snapshots."""
        self._readers: dict[tuple[int, int], set[int]] = {}
        """Live ranks that can read the snapshot of a rank and version."""
        self._updates: dict[int, int] = {}
        for reader, state in settled.items():
            for each in state.snapshots:
                if each.generation == base:
                    self._readers.setdefault((each.rank, each.version), set()).add(reader)
                    self._updates[each.version] = each.updates
        for state in self.live.values():
            self._updates[state.version] = state.updates

    def in_order(self, newest: Settlement | None, last: int | None) -> list[int]:
        """All versions that might be chosen, the best one first; none after `last` or `newest`.

        The newest; but where nobody holds the layout in memory any more, that which most members
        can begin from: a step is sooner done again than a member gets its place back.
        """
        known = set(self._updates)
        if last is not None:
            known = {version for version in known if version <= last}
        if newest is not None:
            end = newest.version
            begun = {end} if last is None or end <= last else set[int]()
            return sorted({version for version in known if version < end} | begun, reverse=True)
        return sorted(known, key=lambda v: (len(self.holders(v, None) or ()), v), reverse=True)

    def updates(self, version: int) -> int:
        """Updates by then, of a version that somebody holds."""
        return self._updates[version]

    def holders(self, version: int, newest: Settlement | None) -> set[int] | None:
        """Live members that can be at `version`; None where one that is in the layout cannot."""
        rolled = newest is not None and version == newest.version
        for rank, state in self.live.items():
            if not (rolled or state.version == version or self._has_own(rank, version)):
                return None
        return self.live.keys() | {rank for rank in self.again if self._has_own(rank, version)}

    def _has_own(self, rank: int, version: int) -> bool:
        return rank in self._readers.get((rank, version), ())

    def snapshots(self, version: int, holders: Collection[int]) -> dict[int, tuple[int, ...]]:
        """Of members that are no holders: who can read their snapshots."""
        return {
            rank: tuple(sorted(self._readers[rank, version]))
            for rank in sorted(self._members)
            if rank not in holders and (rank, version) in self._readers
        }


def _covers(plan: Plan, ranks: Collection[int]) -> bool:
    """Whether `ranks` had all chunks of all layers between them."""
    everybody = plan.active_ranks
    return set(_pieces(plan, ranks)) >= set(_pieces(plan, everybody))


def _pieces(plan: Plan, ranks: Collection[int]) -> Iterator[tuple[int, int]]:
    """Layer and chunk of all that `ranks` held."""
    for group in plan.groups:
        for index, rank in enumerate(group.ranks):
            if rank in ranks:
                chunks = chunks_of_member(index, group.tp, plan.mesh.tp)
                yield from ((layer, chunk) for layer in layers_of(group) for chunk in chunks)


def differing_shards(joined: Mapping[int, Joined]) -> str:
    """The first shard whose replicas have different digests, '' where all agree."""
    seen: dict[str, tuple[int, str]] = {}
    for rank, message in sorted(joined.items()):
        for shard, digest in message.hashes.items():
            first = seen.setdefault(shard, (rank, digest))
            if first[1] != digest:
                return f"{shard} on ranks {first[0]} and {rank}"
    return ""
