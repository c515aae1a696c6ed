"""Which ranks form which TP groups when some are lost or slow (section 6.1 of the paper).

Eq. 4 is one rule for the degree and the members of a group, and what is best for the whole job may
be another. Ranks that are left over are spare: they make the slowest groups of their node faster,
form groups anew, or are standby (`resihp.compiler.spares`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from resihp.compiler.adaptation.problems import least_degree
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.membership import form
from resihp.compiler.spares import Rate, Wanting, nominal_rate
from resihp.errors import NoFeasiblePlan
from resihp.ir.model import Group, GroupName, LayerRange

__all__ = ["RULES", "Members", "choose_members", "degraded"]

Members = Mapping[GroupName, tuple[int, ...]]
"""Ranks of each group; a place without ranks is not in it."""


def fastest_small(group: Group, degree: int, speed: float) -> float:
    """Eq. 4, of equal throughputs the lower degree: no straggler, less to exchange."""
    return nominal_rate(group, degree, speed) * (1 - 1e-6 * degree)


def largest(group: Group, degree: int, speed: float) -> float:
    """The highest degree: slow members stay, each needs the least memory."""
    del group
    return degree + speed / 2


def whole_speed(group: Group, degree: int, speed: float) -> float:
    """Healthy members alone where there are any."""
    return nominal_rate(group, degree, speed) * (1 if speed >= 1 else 1e-3)


RULES: Mapping[str, Rate] = {
    "fastest": nominal_rate,
    "fastest, fewer": fastest_small,
    "largest": largest,
    "healthy alone": whole_speed,
}
"""What makes a group better than another, by the name that a decision tells; the first is the
paper's, of equal throughputs the higher degree."""


def degraded(situation: Situation) -> list[GroupName]:
    """Groups with a member that is lost or slow."""
    bad = {*situation.lost, *(r for r, p in situation.pricing.health.speed.items() if p < 1)}
    groups = situation.previous.groups
    return [group.name for group in groups if not bad.isdisjoint(group.ranks)]


def choose_members(
    situation: Situation,
    rule: Rate,
    layers: Mapping[int, tuple[LayerRange, ...]],
    without: Collection[GroupName] = (),
) -> Members:
    """Members of every group that can be formed, where position pp is to hold `layers[pp]`.

    Places in `without` are given up, and their ranks are spare for the others.
    Where only whole micro-batches move, a replica that lacks a position is given up and its ranks
    are spare for the others.

    Raises NoFeasiblePlan where a position can have no group in any replica.
    """
    k_min = {pp: least_degree(situation, pp, held) for pp, held in layers.items()}
    replicas = list(range(situation.previous.mesh.dp))
    while True:
        every = [GroupName(replica, pp) for replica in replicas for pp in layers]
        places = [place for place in every if place not in without]
        members = _members(situation, rule, k_min, layers, places)
        missing = [place for place in every if place not in members]
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


def _members(
    situation: Situation,
    rule: Rate,
    k_min: Mapping[int, int],
    layers: Mapping[int, tuple[LayerRange, ...]],
    places: Sequence[GroupName],
) -> Members:
    """Ranks of those `places` that can have a group.

    Where there are spare ranks all groups that could be faster may take some; of those that are
    equally slow the ones that have to change anyhow come first.
    """
    before = {group.name: group for group in situation.previous.groups}
    mesh, touched = situation.previous.mesh, frozenset(degraded(situation))
    pool = situation.alive.difference(*(before[place].ranks for place in places if place in before))
    wanting: list[Wanting] = []
    kept: dict[GroupName, tuple[int, ...]] = {}
    for place in places:
        group = before.get(place) or Group(
            replica=place.replica, pp=place.pp, ranks=(), layers=layers[place.pp]
        )
        least = k_min[place.pp]
        if place in touched or group.tp < least or (group.tp < mesh.tp and (pool or touched)):
            own = tuple(rank for rank in group.ranks if rank in situation.alive)
            wanting.append(Wanting(group, own, least))
        else:
            kept[place] = group.ranks
    formed = form(
        sorted(wanting, key=lambda want: want.group.name not in touched),
        pool,
        situation.state,
        speed_of=situation.speed_of,
        rate=rule,
        node_of=situation.pricing.cluster.node_of,
    )
    return kept | {name: group.ranks for name, group in formed.items()}
