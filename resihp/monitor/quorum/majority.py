"""What a quorum is."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["is_quorum"]


def is_quorum(present: Collection[int], voters: Collection[int]) -> bool:
    """Whether `present` holds more than half of `voters`, or half with the lowest of them.

    Two quorums of the same voters always share one.
    """
    assert voters, "nobody votes"
    electorate = set(voters)
    num_present = len(electorate.intersection(present))
    if 2 * num_present == len(electorate):
        return min(electorate) in present
    return 2 * num_present > len(electorate)
