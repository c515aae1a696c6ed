"""How large and how fast each group becomes when several want the same spare ranks.

Each group is at least as fast as the best of its own survivors (Eq. 3 and 4 of the paper). Where
ranks are left over, the slowest group is made as fast as all ranks together allow, then the next
slowest, and so on: the slowest stage sets the pace of a pipeline. A group may then have to give a
fast rank away that it can do without.

A group of degree k with slowest member q asks for k ranks of speed q or more. Such demands are
nested, so all can be met exactly when for each speed no more ranks are asked for than there are
(Hall's condition), and then it does not matter which of the fast enough ranks a group takes as
long as those that ask for the fastest come first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from resihp.ir.model import Group, GroupName

__all__ = ["Demand", "Rate", "Wanting", "nominal_rate", "share_out"]

_MOST_STATES = 64
"""Ways to serve the first few groups that are followed up. Only jobs with many different speeds
have more, and for those a sharing may be found that is not the best."""

Rate = Callable[[Group, int, float], float]
"""How fast a group is at a TP degree with a slowest member of some speed; larger is faster."""


class Wanting(NamedTuple):
    """A group to be formed."""

    group: Group
    own: tuple[int, ...]
    """Live ranks that it may keep."""
    least: int
    """k_min of Eq. 3: the TP degree below which a device's memory does not suffice."""


class Demand(NamedTuple):
    """What a group gets: `degree` ranks, each at least as fast as `speed`."""

    degree: int
    speed: float
    num_spares: int
    """How many of them are not its own."""


class _Served(NamedTuple):
    """One way to serve the first few groups."""

    cost: tuple[int, int]
    """Spares, then the degrees, larger ones first: more members keep what they hold."""
    demands: tuple[Demand, ...]


def nominal_rate(group: Group, degree: int, speed: float) -> float:
    """Eq. 4: 1 is one healthy device, whatever the group holds."""
    del group
    return degree * speed


def share_out(
    wanting: Sequence[Wanting],
    pool: Collection[int],
    max_degree: int,
    speed_of: Callable[[int], float],
    rate: Rate = nominal_rate,
) -> dict[GroupName, Demand] | None:
    """What each group gets of its own ranks and of `pool`; None where they are too few for all.

    Degrees are powers of two from `least` to `max_degree`. Ranks of speed 0 are taken by nobody.
    Where groups are equally slow and not all can be made faster, the first of `wanting` are.
    """
    share = _Share(wanting, pool, max_degree, speed_of, rate)
    targets = share.floors
    if share.served(targets) is None:
        return None
    open_groups = set(targets if share.has_spares else ())
    while open_groups:
        targets = share.raised(targets, open_groups)
        slowest = min(targets[name] for name in open_groups)
        slow = [
            want.group.name
            for want in reversed(wanting)
            if want.group.name in open_groups and targets[want.group.name] == slowest
        ]
        stuck = [name for name in slow if not share.can_rise(targets, name)]
        open_groups.difference_update(stuck or [share.who_stays(targets, open_groups, slow)])
    demands = share.served(targets)
    assert demands is not None, "nothing is promised that cannot be had"
    return {want.group.name: demand for want, demand in zip(wanting, demands, strict=True)}


class _Share:
    def __init__(
        self,
        wanting: Sequence[Wanting],
        pool: Collection[int],
        max_degree: int,
        speed_of: Callable[[int], float],
        rate: Rate,
    ) -> None:
        self._wanting = wanting
        self._own = {want.group.name: sorted(map(speed_of, want.own)) for want in wanting}
        speeds = [*map(speed_of, pool), *(s for own in self._own.values() for s in own)]
        self._speeds = sorted({speed for speed in speeds if speed > 0}, reverse=True)
        self._supply = [sum(speed >= least for speed in speeds) for least in self._speeds]
        self._options = {
            want.group.name: [
                (rate(want.group, degree, speed), self._demand(want, degree, speed), at)
                for degree in _degrees(want.least, max_degree)
                for at, speed in enumerate(self._speeds)
            ]
            for want in wanting
        }
        self.floors: dict[GroupName, float] = {}
        """What the own survivors of each group can do; 0 where they are too few."""
        taken = 0
        for name, options in self._options.items():
            alone = [(rate, demand.degree) for rate, demand, _ in options if not demand.num_spares]
            self.floors[name], degree = max(alone, default=(0.0, 0))
            taken += degree
        self.has_spares = taken < len(speeds) or not all(self.floors.values())
        """Whether ranks change hands at all."""

    def _demand(self, want: Wanting, degree: int, speed: float) -> Demand:
        own = sum(mine >= speed for mine in self._own[want.group.name])
        return Demand(degree, speed, max(0, degree - own))

    def served(self, targets: Mapping[GroupName, float]) -> tuple[Demand, ...] | None:
        """Demands that reach all `targets` with the fewest spares; None where that cannot be."""
        states = {(0,) * len(self._speeds): _Served((0, 0), ())}
        for want in self._wanting:
            enough = self._enough(want.group.name, targets)
            found = dict[tuple[int, ...], _Served]()
            for used, (cost, demands) in states.items():
                for demand, at in enough:
                    now = (*used[:at], *(count + demand.degree for count in used[at:]))
                    if any(map(int.__gt__, now, self._supply)):
                        continue
                    new_cost = cost[0] + demand.num_spares, cost[1] - demand.degree
                    served = _Served(new_cost, (*demands, demand))
                    found[now] = min(found.get(now, served), served)
            states = _undominated(found)
        return min(states.values()).demands if states else None

    def _enough(
        self, name: GroupName, targets: Mapping[GroupName, float]
    ) -> Collection[tuple[Demand, int]]:
        """For each degree the demand for the slowest ranks that reach the target."""
        return {
            demand.degree: (demand, at)
            for rate, demand, at in self._options[name]
            if rate >= targets[name]
        }.values()

    def raised(
        self, targets: Mapping[GroupName, float], names: Collection[GroupName]
    ) -> dict[GroupName, float]:
        """`targets` with all of `names` at least at the highest level that all can reach."""
        floor = min(targets[name] for name in names)
        levels = sorted(
            {rate for name in names for rate, *_ in self._options[name] if rate > floor}
        )
        best, low, high = dict(targets), 0, len(levels)
        while low < high:
            middle = (low + high) // 2
            level = levels[middle]
            tried = {n: max(t, level) if n in names else t for n, t in targets.items()}
            if self.served(tried) is None:
                high = middle
            else:
                best, low = tried, middle + 1
        return best

    def who_stays(
        self,
        targets: Mapping[GroupName, float],
        names: Collection[GroupName],
        slow: Sequence[GroupName],
    ) -> GroupName:
        """Of the `slow` ones, which cannot all rise, the one without which the others rise most."""

        def rest(name: GroupName) -> list[float]:
            others = [other for other in names if other != name]
            return sorted(self.raised(targets, others).values())

        return max(slow, key=rest) if len(names) > 1 else slow[0]

    def can_rise(self, targets: Mapping[GroupName, float], name: GroupName) -> bool:
        """Whether one group alone can be faster than its target."""
        above = [rate for rate, *_ in self._options[name] if rate > targets[name]]
        return bool(above) and self.served({**targets, name: min(above)}) is not None


def _degrees(least: int, most: int) -> list[int]:
    """Powers of two, from a power of two."""
    degrees: list[int] = []
    while least <= most:
        degrees.append(least)
        least *= 2
    return degrees


def _undominated(states: Mapping[tuple[int, ...], _Served]) -> dict[tuple[int, ...], _Served]:
    """Those that no other one betters in ranks of every speed and in cost."""
    kept: dict[tuple[int, ...], _Served] = {}
    for used in sorted(states, key=lambda used: (states[used].cost, used)):
        if not any(all(map(int.__le__, other, used)) for other in kept):
            kept[used] = states[used]
            if len(kept) == _MOST_STATES:
                break
    return kept
