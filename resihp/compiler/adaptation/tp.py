"""Which ranks form which TP groups when some are lost or slow (section 6.1 of the paper).

Each touched group goes on with the subset of its live members that a rule prefers; Eq. 4 is one
such rule, and what is best for the whole job may be another. Ranks that are left over are standby.
They fill up groups of their node afterwards, the slow ones last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from resihp.compiler.adaptation.problems import least_degree
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.subgroup import Subgroup, subgroups
from resihp.errors import NoFeasiblePlan
from resihp.ir.model import GroupName, LayerRange

__all__ = ["RULES", "Members", "Rule", "choose_members", "degraded"]

Members = Mapping[GroupName, tuple[int, ...]]
"""Ranks of each group, in no order that matters; a place without ranks is not in it."""
Rule = Callable[[Sequence[Subgroup]], Subgroup]
"""Picks one of the subgroups that a place can have, given the highest throughput first."""


def fastest(options: Sequence[Subgroup]) -> Subgroup:
    """Eq. 4: the highest throughput, of equal ones the higher degree."""
    return options[0]


def fastest_small(options: Sequence[Subgroup]) -> Subgroup:
    """Eq. 4, of equal throughputs the lower degree: no straggler, less to exchange."""
    best = options[0].throughput
    return min((o for o in options if o.throughput >= best * (1 - 1e-9)), key=lambda o: o.tp)


def largest(options: Sequence[Subgroup]) -> Subgroup:
    """The highest degree: slow members stay, each needs the least memory."""
    return max(options, key=lambda option: option.tp)


def whole_speed(options: Sequence[Subgroup]) -> Subgroup:
    """Healthy members alone where there are any."""
    return next((option for option in options if option.throughput >= option.tp), options[0])


RULES: Mapping[str, Rule] = {
    "fastest": fastest,
    "fastest, fewer": fastest_small,
    "largest": largest,
    "healthy alone": whole_speed,
}
"""By the name that a decision tells; the first is the paper's."""


def degraded(situation: Situation) -> list[GroupName]:
    """Groups with a member that is lost or slow."""
    bad = {*situation.lost, *(r for r, p in situation.pricing.health.speed.items() if p < 1)}
    groups = situation.previous.groups
    return [group.name for group in groups if not bad.isdisjoint(group.ranks)]


def choose_members(
    situation: Situation, rule: Rule, layers: Mapping[int, tuple[LayerRange, ...]]
) -> Members:
    """Members of every group that can be formed, where position pp is to hold `layers[pp]`.

    Where only whole micro-batches move, a replica that lacks a position is given up and its ranks
    are spare for the others.

    Raises NoFeasiblePlan where a position can have no group in any replica.
    """
    k_min = {pp: least_degree(situation, held) for pp, held in layers.items()}
    replicas = list(range(situation.previous.mesh.dp))
    while True:
        places = [GroupName(replica, pp) for replica in replicas for pp in layers]
        members = _Choice(situation, rule, k_min, places).run()
        missing = [place for place in places if place not in members]
        if not situation.profile.moves_single_stages and missing and len(replicas) > 1:
            replicas.remove(_neediest(missing))
            continue
        _require_all(missing, members, layers, k_min)
        return members


def _neediest(missing: Iterable[GroupName]) -> int:
    """The replica to give up: the one that lacks most, of these the last."""
    replicas = [place.replica for place in missing]
    return max(replicas, key=lambda replica: (replicas.count(replica), replica))


def _require_all(
    missing: Sequence[GroupName],
    members: Members,
    layers: Mapping[int, tuple[LayerRange, ...]],
    k_min: Mapping[int, int],
) -> None:
    held = {place.pp for place in members}
    for pp in layers:
        if pp not in held:
            spelled = ",".join(map(str, layers[pp]))
            needs = f"{k_min[pp]} rank{'' if k_min[pp] == 1 else 's'} of one group"
            lacking = sum(place.pp == pp for place in missing)
            raise NoFeasiblePlan(
                f"no replica can hold layers {spelled} any more: each of the {lacking} needs "
                f"{needs} for its memory"
            )


class _Choice:
    """One pass over all places."""

    def __init__(
        self,
        situation: Situation,
        rule: Rule,
        k_min: Mapping[int, int],
        places: Sequence[GroupName],
    ) -> None:
        self._situation = situation
        self._rule = rule
        self._k_min = k_min
        self._places = places
        self._max = situation.previous.mesh.tp
        self._touched = frozenset(degraded(situation))
        self._own = {
            group.name: [rank for rank in group.ranks if rank in situation.alive]
            for group in situation.previous.groups
        }
        self._members: dict[GroupName, tuple[int, ...]] = {}
        used = [rank for place in places for rank in self._own.get(place, ())]
        self._pool = set(situation.alive.difference(used))

    def run(self) -> Members:
        for place in self._places:
            own = self._own.get(place, [])
            if place in self._touched or len(own) < self._k_min[place.pp]:
                self._shrink(place, own)
            else:
                self._members[place] = tuple(own)
        if self._pool:
            self._fill()
        return self._members

    def _shrink(self, place: GroupName, own: Sequence[int]) -> None:
        """Go on with some of the live members; the others are spare."""
        choice = self._pick(place, own)
        if choice is not None:
            self._members[place] = choice.ranks
        self._pool.update(own)
        self._pool.difference_update(self._members.get(place, ()))

    def _fill(self) -> None:
        """Spare ranks make slow groups faster and missing ones whole, the worst off first.

        Of those that are as badly off, the ones that have to change anyhow come first.
        """
        wanting = [place for place in self._places if self._throughput(place) < self._max]
        for place in sorted(
            wanting, key=lambda place: (self._throughput(place), place not in self._touched, place)
        ):
            for near in self._pools(place):
                own = self._members.get(place, ())
                choice = self._pick(place, [*own, *near])
                if choice is not None and choice.throughput > self._throughput(place):
                    self._pool.update(own)
                    self._pool.difference_update(choice.ranks)
                    self._members[place] = choice.ranks
                    break

    def _pick(self, place: GroupName, ranks: Sequence[int]) -> Subgroup | None:
        options = subgroups(
            ranks, self._situation.speed_of, k_min=self._k_min[place.pp], k_max=self._max
        )
        return self._rule(options) if options else None

    def _throughput(self, place: GroupName) -> float:
        ranks = self._members.get(place, ())
        return len(ranks) * min(map(self._situation.speed_of, ranks), default=0.0)

    def _pools(self, place: GroupName) -> Iterator[list[int]]:
        """Spare ranks that may join a place: those of its nodes; to form it anew, any others.

        A group that is formed anew had better stand on one node.
        """
        mesh = self._situation.previous.mesh
        node_of = self._situation.pricing.cluster.node_of
        speed_of = self._situation.speed_of
        first = (place.replica * mesh.pp + place.pp) * mesh.tp
        home = range(first, first + mesh.tp)
        nodes = {node_of(rank) for rank in (*home, *self._members.get(place, ()))}
        ordered = sorted(self._pool, key=lambda r: (r not in home, -speed_of(r), r))
        yield [rank for rank in ordered if node_of(rank) in nodes]
        if place not in self._members:
            by_node: dict[int, list[int]] = {}
            for rank in ordered:
                by_node.setdefault(node_of(rank), []).append(rank)
            yield from sorted(by_node.values(), key=len, reverse=True)
            yield ordered
