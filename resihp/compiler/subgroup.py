"""Which devices go on as a TP group when some are lost or slow (section 6.1 of the paper).

A group is as fast as its slowest member, so degree k of devices with throughputs p does
k * min(p) (Eq. 4). Degrees are powers of two from k_min, which memory sets, upwards (Eq. 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Subgroup", "best_subgroup", "subgroups"]


class Subgroup(NamedTuple):
    """Devices that may form a TP group."""

    ranks: tuple[int, ...]
    """As many as its degree, in the order in which they were given."""
    throughput: float
    """k * min(p): 1 is one healthy device."""

    @property
    def tp(self) -> int:
        """TP degree."""
        return len(self.ranks)


def subgroups(
    ranks: Sequence[int],
    speed_of: Callable[[int], float],
    *,
    k_min: int = 1,
    k_max: int | None = None,
) -> list[Subgroup]:
    """For each feasible degree the fastest devices of that number, the highest throughput first.

    Of equal throughputs the larger degree comes first: more members keep what they hold and each
    needs less memory. Lost devices have speed 0 and are never taken.
    """
    alive = [rank for rank in ranks if speed_of(rank) > 0]
    fastest = sorted(alive, key=lambda rank: -speed_of(rank))
    limit = len(alive) if k_max is None else min(len(alive), k_max)
    found: list[Subgroup] = []
    degree = 1
    while degree <= limit:
        if degree >= k_min:
            chosen = set(fastest[:degree])
            throughput = degree * speed_of(fastest[degree - 1])
            found.append(Subgroup(tuple(r for r in ranks if r in chosen), throughput))
        degree *= 2
    return sorted(found, key=lambda group: (-group.throughput, -group.tp))


def best_subgroup(
    ranks: Sequence[int],
    speed_of: Callable[[int], float],
    *,
    k_min: int = 1,
    k_max: int | None = None,
) -> Subgroup | None:
    """The subgroup of Eq. 4; None where fewer than `k_min` devices are left."""
    return next(iter(subgroups(ranks, speed_of, k_min=k_min, k_max=k_max)), None)
