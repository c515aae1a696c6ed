"""Who hangs: the one rank that all others wait for in the end, and that waits for nobody.

A hang stalls everybody, so standing still indicts nobody. Each rank says what it does and what it
waits for; the edges that follow from the plan (`monitor.where`) make a graph. A suspect is its
only minimal element: a rank that computes, or has not entered a collective that others wait in,
or does not answer although its supervisor beats. Two of them, a circle, or a message that is on
its way: nothing is clear, and nobody is suspected. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from resihp.ir.model import Plan
from resihp.ir.statements import spell_numbers
from resihp.monitor.where import Standing, standings
from resihp.wire.messages import At

__all__ = ["Suspect", "suspect"]


class Suspect(NamedTuple):
    """The rank that holds all others up."""

    rank: int
    reason: str
    """What it does, or that it does not answer, and for whom."""


def suspect(
    plan: Plan, at: Mapping[int, At], silent: Collection[int], least_s: float
) -> Suspect | None:
    """Whom all active ranks of `plan` wait for, where that is clear.

    `at` has the answers of those that answered, `silent` are those that did not in time. Who has
    been where it is for less than `least_s` is not suspected, and nobody in a declared pause.
    """
    active = plan.active_ranks
    if any(rank not in at and rank not in silent for rank in active):
        return None
    answers = {rank: at[rank] for rank in active if rank not in silent}
    found = standings(plan, answers)
    waiting = {rank: list(standing.waits_for) for rank, standing in found.items()}
    for rank, others in _waits_in_collectives(plan, answers, found).items():
        waiting[rank] += others
    minimal = [rank for rank in active if not waiting.get(rank)]
    if len(minimal) != 1:
        return None
    (rank,) = minimal
    if _reach(rank, waiting) != set(active):
        return None  # a circle holds somebody else
    others = [other for other in active if other != rank]
    if not others:
        return None
    are_many = len(others) > 1
    held = f"rank{'s' * are_many} {spell_numbers(others)} wait{'s' * (not are_many)} for it"
    if rank in silent:
        return Suspect(rank, f"it does not answer, and {held}")
    answer = answers[rank]
    if answer.pause is not None or answer.since_s < least_s or not _may_be_to_blame(answer):
        return None
    return Suspect(rank, f"it {found[rank].does} for {answer.since_s:.1f} s, and {held}")


def _may_be_to_blame(at: At) -> bool:
    """It computes or does nothing; it does not wait for a message, nor within a collective."""
    return not at.compute_waits and not (at.compute < 0 and at.comm >= 0)


def _waits_in_collectives(
    plan: Plan, at: Mapping[int, At], found: Mapping[int, Standing]
) -> dict[int, list[int]]:
    """Members of a TP group that are at one instruction: who has entered more of its collectives
    waits for who has entered fewer."""
    waits: dict[int, list[int]] = {}
    for group in plan.groups:
        members = [rank for rank in group.ranks if rank in at and not found[rank].waits_for]
        at_one = {(at[rank].step, at[rank].compute, at[rank].compute_waits) for rank in members}
        if len(members) < 2 or len(at_one) > 1 or at[members[0]].compute < 0:
            continue
        least = min(at[rank].collectives for rank in members)
        late = [rank for rank in members if at[rank].collectives == least]
        for rank in members:
            if at[rank].collectives > least:
                waits[rank] = late
    return waits


def _reach(end: int, waiting: Mapping[int, Collection[int]]) -> set[int]:
    """Ranks that wait for `end`, directly or through others, and itself."""
    waiters: dict[int, list[int]] = {}
    for rank, others in waiting.items():
        for other in others:
            waiters.setdefault(other, []).append(rank)
    seen, open_ = {end}, [end]
    while open_:
        for rank in waiters.get(open_.pop(), ()):
            if rank not in seen:
                seen.add(rank)
                open_.append(rank)
    return seen
