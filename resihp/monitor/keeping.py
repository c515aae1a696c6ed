"""What is kept of an interrupted iteration: the most micro-batches that nothing speaks against.

A micro-batch may be kept if, at every stage, all members of a group that stays the same have its
weight gradient. They have sums of sets of micro-batches, which cannot be taken apart: a set of
which one is redone is redone whole. Redoing it takes more out of other sets, at other stages, until
nothing changes any more. What is left then is the largest choice there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from resihp.ir.kept import same_groups
from resihp.ir.model import MicroBatch, Plan
from resihp.ir.placement import placement_of
from resihp.wire.messages import KeptSums, Settled

__all__ = ["NOTHING", "Choice", "choose_kept"]


class Choice(NamedTuple):
    """What is kept, and where it lies."""

    micro_batches: tuple[MicroBatch, ...]
    """Ascending."""
    sums: tuple[KeptSums, ...]
    """By stage and replica."""


NOTHING = Choice((), ())


class _Sums(NamedTuple):
    """What the group of `replica` has of a stage."""

    stage: int
    replica: int
    complete: frozenset[int]
    """On all members."""
    sets: tuple[frozenset[int], ...]
    """All sets of all members."""


def choose_kept(ran: Plan, plan: Plan, version: int, settled: Mapping[int, Settled]) -> Choice:
    """The largest choice for `plan`, which follows the layout of `ran` at step `version`.

    `settled` are the states that live ranks reported, of which those of another step say nothing.
    """
    total = ran.mesh.dp * ran.batch.microbatches
    num_stages = placement_of(ran).num_stages
    sums = list(_sums(ran, plan, version, settled, total))
    places: list[dict[int, int]] = [{} for _ in range(num_stages)]
    for each in sums:
        places[each.stage].update(dict.fromkeys(each.complete, each.replica))
    keep = set(range(total))
    for place in places:
        keep &= place.keys()
    _take_out(keep, [found for each in sums for found in each.sets])
    if not keep:
        return NOTHING
    return Choice(
        tuple(MicroBatch(*divmod(number, ran.batch.microbatches)) for number in sorted(keep)),
        tuple(
            KeptSums(stage=each.stage, replica=each.replica, microbatches=kept)
            for each in sums
            if (kept := tuple(sorted(each.complete & keep)))
        ),
    )


def _take_out(keep: set[int], sets: Sequence[frozenset[int]]) -> None:
    """Remove from `keep`, again and again, all of a set of which one is not in it."""
    left = [found for found in sets if not found.isdisjoint(keep)]
    while True:
        torn = [found for found in left if not found <= keep]
        if not torn:
            return
        for found in torn:
            keep -= found
        left = [found for found in left if not found.isdisjoint(keep)]


def _sums(
    ran: Plan, plan: Plan, version: int, settled: Mapping[int, Settled], total: int
) -> Iterator[_Sums]:
    """Of every stage of every group that stays as it is, stage by stage."""
    same, placement = same_groups(ran, plan), placement_of(ran)
    groups = [g for g in sorted(ran.groups, key=lambda g: g.name) if g.name in same]
    for stage, pp in enumerate(placement.pp):
        for group in groups:
            if group.pp == pp:
                sets = [_reported(settled.get(r), version, stage, total) for r in group.ranks]
                complete = frozenset(range(total))
                for of_rank in sets:
                    complete &= frozenset[int]().union(*of_rank)
                every = tuple(found for of_rank in sets for found in of_rank)
                yield _Sums(stage, group.replica, complete, every)


def _reported(
    state: Settled | None, version: int, stage: int, total: int
) -> Sequence[frozenset[int]]:
    """Sets that a rank reported of a stage; none where the report makes no sense."""
    if state is None or state.held_step != version:
        return ()
    found = [frozenset(each) for of in state.held if of.stage == stage for each in of.sets]
    known = [number for each in found for number in each]
    is_right = len(known) == len(set(known)) and all(0 <= number < total for number in known)
    return found if is_right else ()
