"""Who gets spare ranks, against all ways to share them out, and the groups that come of it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import MESHES, adaptation_findings, layout, random_layout
from plan_cases import plan_of

from resihp.compiler.membership import form
from resihp.compiler.reconfigure import lines_to
from resihp.compiler.sources import State
from resihp.compiler.spares import Rate, Wanting, nominal_rate, share_out
from resihp.ir.model import Group, LayerRange, Plan

MAX_DEGREE = 4
SPEEDS = (1.0, 1.0, 1.0, 0.75, 0.5, 0.3)


def group_of(number: int, ranks: tuple[int, ...]) -> Group:
    return Group(replica=0, pp=number, ranks=ranks, layers=(LayerRange(number, number),))


def random_case(rng: random.Random) -> tuple[list[Wanting], list[int], dict[int, float]]:
    """Two or three groups, up to seven ranks in all."""
    num_ranks, num_groups = rng.randint(2, 7), rng.randint(2, 3)
    places = [rng.randint(0, num_groups) for _ in range(num_ranks)]
    wanting = [
        Wanting(
            group_of(number, own := tuple(r for r, at in enumerate(places) if at == number)),
            own,
            rng.choice((1, 1, 2)),
        )
        for number in range(num_groups)
    ]
    pool = [rank for rank, place in enumerate(places) if place == num_groups]
    return wanting, pool, {rank: rng.choice(SPEEDS) for rank in range(num_ranks)}


def best_alone(speeds: Iterable[float], least: int = 1) -> tuple[float, int]:
    """Eq. 3 and 4 for one group: its throughput and its degree; 0 where it cannot be formed."""
    fastest = sorted((speed for speed in speeds if speed > 0), reverse=True)
    degrees = [k for k in (1, 2, 4, 8) if least <= k <= len(fastest)]
    return max(((k * fastest[k - 1], k) for k in degrees), default=(0.0, 0))


def floors_of(wanting: list[Wanting], speeds: dict[int, float]) -> list[float]:
    return [best_alone(map(speeds.__getitem__, w.own), w.least)[0] for w in wanting]


def best_shares(wanting: list[Wanting], speeds: dict[int, float]) -> list[float] | None:
    """The rates, slowest first, that no sharing beats slowest first; no group gets worse."""
    floors = floors_of(wanting, speeds)
    found: list[list[float]] = []
    for places in product(range(len(wanting) + 1), repeat=len(speeds)):
        rates: list[float] = []
        for number, want in enumerate(wanting):
            ranks = [rank for rank, place in enumerate(places) if place == number]
            if len(ranks) < want.least or len(ranks) not in (1, 2, 4):
                break
            rate = len(ranks) * min(speeds[rank] for rank in ranks)
            if rate < floors[number] - 1e-9:
                break
            rates.append(rate)
        else:
            found.append(sorted(rates))
    return max(found, default=None)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_spare_ranks_go_where_the_slowest_groups_gain_most(seed):
    """Against all ways to share: feasible alike, and the rates, slowest first, are the best."""
    wanting, pool, speeds = random_case(random.Random(seed))
    demands = share_out(wanting, pool, MAX_DEGREE, speeds.__getitem__)
    best = best_shares(wanting, speeds)
    if demands is None:
        assert best is None
        return
    assert best is not None
    rates = sorted(demand.degree * demand.speed for demand in demands.values())
    floors = floors_of(wanting, speeds)
    if num_used(wanting, speeds) == len(speeds) and all(floors):
        assert rates == pytest.approx(sorted(floors))
    else:
        assert rates == pytest.approx(best)


def num_used(wanting: list[Wanting], speeds: dict[int, float]) -> int:
    """How many ranks the groups use when each keeps to its own."""
    return sum(best_alone(map(speeds.__getitem__, w.own), w.least)[1] for w in wanting)


def wants(groups: Iterable[Group], alive: Iterable[int], least: int = 1) -> list[Wanting]:
    """Groups with what they have left."""
    left = frozenset(alive)
    return [Wanting(g, tuple(rank for rank in g.ranks if rank in left), least) for g in groups]


def formed(
    previous: Plan,
    groups: Sequence[Group],
    lost: frozenset[int],
    speeds: Mapping[int, float] | None = None,
    rate: Rate = nominal_rate,
    per_node: int | None = None,
) -> list[tuple[int, ...]]:
    """The ranks of each of `groups` of `previous`; the other groups are dropped."""
    alive = frozenset(range(previous.mesh.world)) - lost
    pool = alive.difference(*(group.ranks for group in groups))
    found = form(
        wants(groups, alive),
        pool,
        State(previous, lost),
        speed_of=lambda rank: (speeds or {}).get(rank, 1.0),
        rate=rate,
        node_of=None if per_node is None else (lambda rank: rank // per_node),
    )
    return [found[group.name].ranks if group.name in found else () for group in groups]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(MESHES), st.sampled_from([None, 2, 4]))
def test_groups_of_any_speeds_and_losses_are_formed_as_promised(seed, mesh, per_node):
    """Sound after the plan before, no rank twice, none slower than its own survivors were."""
    rng = random.Random(seed)
    previous = random_layout(rng, mesh, 2 * mesh.pp + 2)
    lost = frozenset(rng.sample(range(mesh.world), rng.choice((0, 1, 2))))
    speeds = {r: rng.choice((0.3, 0.5, 0.8)) for r in rng.sample(range(mesh.world), 2)}
    state = State(previous, lost)
    if any(True for _ in state.lost_parts()):
        return
    members = formed(previous, previous.groups, lost, speeds, per_node=per_node)
    pairs = zip(previous.groups, members, strict=True)
    groups = [msgspec.structs.replace(group, ranks=ranks) for group, ranks in pairs if ranks]
    if {group.pp for group in groups} != set(range(mesh.pp)):
        return
    new = layout(mesh, previous.model.layers, tuple(groups), lost)
    new = msgspec.structs.replace(new, reconfigure=lines_to(state, new.groups))
    assert adaptation_findings(new, previous) == []

    def speed_of(rank: int) -> float:
        return 0.0 if rank in lost else speeds.get(rank, 1.0)

    for before, ranks in zip(previous.groups, members, strict=True):
        own, _ = best_alone(map(speed_of, before.ranks))
        assert len(ranks) * min(map(speed_of, ranks), default=0) >= own - 1e-9


def test_a_slow_member_gives_its_seat_to_a_spare():
    """Rank 1 at half speed goes, rank 4 of the dropped replica holds the same shard."""
    healthy = plan_of(tp=2, pp=1, dp=3)
    members = formed(healthy, healthy.groups[:2], frozenset({5}), {0: 0.5})
    assert members == [(4, 1), (2, 3)]


def test_slow_ranks_are_the_last_to_be_taken():
    """Two spares, one slow: the lost member's seat goes to the healthy one."""
    healthy = plan_of(tp=2, pp=1, dp=3)
    members = formed(healthy, healthy.groups[:2], frozenset({1}), {5: 0.9})
    assert members[0] == (0, 4)


def test_a_spare_of_another_node_is_not_taken():
    """Rank 4 is free, but the group's node has ranks 0..3."""
    healthy = plan_of(tp=2, pp=1, dp=3)
    assert formed(healthy, healthy.groups[:2], frozenset({1}), per_node=4)[0] == (0,)


def test_a_group_whose_node_is_gone_goes_whole_to_another():
    """Both members of dp0.pp0 are lost; the dropped replica's node has two."""
    healthy = plan_of(tp=2, pp=1, dp=3)
    assert formed(healthy, healthy.groups[:2], frozenset({0, 1}), per_node=2)[0] == (4, 5)


def test_no_spare_is_promised_twice():
    """Node 1 has room for one of the two groups that are to come back to it, node 0 for two."""
    healthy = plan_of(tp=4, pp=2, dp=2)
    moved = msgspec.structs.replace(healthy.groups[0], ranks=(8, 9, 10, 11))
    previous = layout(healthy.mesh, healthy.model.layers, (moved, healthy.groups[1]), frozenset())
    gone = [msgspec.structs.replace(group, ranks=()) for group in healthy.groups[2:]]
    groups = [moved, healthy.groups[1], *gone]
    wanting = wants(groups, range(16), least=4)
    found = form(
        wanting,
        frozenset((0, 1, 2, 3, 12, 13, 14, 15)),
        State(previous, frozenset()),
        speed_of=lambda rank: 1.0,
        node_of=lambda rank: rank // 8,
    )
    assert [found[group.name].ranks for group in groups] == [
        (8, 9, 10, 11),
        (4, 5, 6, 7),
        (12, 13, 14, 15),
        (0, 1, 2, 3),
    ]


def test_a_rate_of_ones_own_decides_which_group_is_slowest():
    """Both lost one of two; the spare goes to the one that holds more layers."""
    healthy = plan_of(tp=2, pp=2, dp=3)
    members = formed(
        healthy,
        healthy.groups[:4],
        frozenset({1, 2, 9, 10, 11}),
        rate=lambda group, degree, speed: degree * speed / (1 + group.pp),
    )
    assert list(map(len, members)) == [1, 2, 2, 2]
