"""From one plan to the next: who needs which state, where it comes from, what may not happen."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from placed import placed
from plan_build import make_plan

from resihp.ir.measures import state_moves
from resihp.ir.model import Group, GroupName, LayerRange, Load, Move, Plan, Reshard, Resume
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.reshard import ShardMove, loads, transfers
from resihp.ir.verify import verify
from resihp.ir.verify.adaptation import check_adaptation, check_targets
from resihp.ir.verify.findings import Findings

BEFORE = make_plan(tp=2, dp=2)
"""Ranks 0,1 | 2,3 of replica 0 and 4,5 | 6,7 of replica 1."""
LAST = LayerRange(4, 7)


def after(
    *,
    degrees: dict[GroupName, int] | None = None,
    ranks: dict[GroupName, tuple[int, ...]] | None = None,
    lost: tuple[int, ...] = (),
    reshards: tuple[Reshard, ...] = (),
) -> Plan:
    """BEFORE with other groups; ranks that are left over become standby."""
    plan = make_plan(tp=2, dp=2, degrees=degrees)
    groups = tuple(
        msgspec.structs.replace(group, ranks=(ranks or {}).get(group.name, group.ranks))
        for group in plan.groups
    )
    used = {rank for group in groups for rank in group.ranks} | set(lost)
    standby = tuple(rank for rank in range(plan.mesh.world) if rank not in used)
    return msgspec.structs.replace(
        plan, groups=groups, standby=standby, lost=lost, reconfigure=reshards
    )


def codes(plan: Plan, previous: Plan = BEFORE) -> list[str]:
    return [finding.code for finding in verify(parse(print_plan(plan)), previous=previous)]


SHRUNK = {GroupName(1, 1): 1}
SHRINK = Reshard(layers=LAST, source=GroupName(0, 1), target=GroupName(1, 1))


def shrunk(**changes) -> Plan:
    """Rank 7 is lost, rank 6 becomes the only member of dp1.pp1."""
    return after(degrees=SHRUNK, **{"lost": (7,), "reshards": (SHRINK,), **changes})


def test_a_shrunken_group_takes_the_other_half_from_its_peer():
    """Rank 6 held chunk 0 of each layer; chunk 1 comes from rank 3."""
    assert codes(shrunk()) == []
    assert transfers(BEFORE, shrunk()) == tuple(
        ShardMove(layer=layer, chunk=1, num_chunks=2, source=3, target=6) for layer in range(4, 8)
    )


def test_a_standby_rank_gets_everything():
    """A rank that held nothing also gets the tensors that are not sharded."""
    before = after(degrees=SHRUNK)
    plan = after(
        degrees=SHRUNK,
        ranks={GroupName(1, 1): (7,)},
        lost=(6,),
        reshards=(SHRINK,),
    )
    assert codes(plan, before) == []
    moves = transfers(before, plan)
    assert [move for move in moves if move.layer == 4] == [
        ShardMove(layer=4, chunk=0, num_chunks=1, source=2, target=7, replicated=True),
        ShardMove(layer=4, chunk=0, num_chunks=2, source=2, target=7),
        ShardMove(layer=4, chunk=1, num_chunks=2, source=3, target=7),
    ]


def test_nothing_moves_without_a_change():
    """The same layout needs no reconfigure block."""
    assert codes(BEFORE) == []
    assert transfers(BEFORE, BEFORE) == ()


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        (shrunk(reshards=()), "RHP801"),
        (shrunk(reshards=(SHRINK, SHRINK)), "RHP802"),
        (
            shrunk(reshards=(msgspec.structs.replace(SHRINK, source=GroupName(0, 0)),)),
            "RHP803",
        ),
        (shrunk(reshards=(msgspec.structs.replace(SHRINK, source=GroupName(1, 1)),)), "RHP804"),
        (
            shrunk(
                reshards=(
                    SHRINK,
                    msgspec.structs.replace(
                        SHRINK, layers=LayerRange(3, 7), target=GroupName(0, 1)
                    ),
                )
            ),
            "RHP805",
        ),
        (
            shrunk(reshards=(SHRINK, msgspec.structs.replace(SHRINK, target=GroupName(0, 1)))),
            "RHP806",
        ),
    ],
)
def test_each_wrong_reconfiguration_has_its_code(plan, code):
    """One finding, at the reshard line or at the group that lacks state."""
    assert codes(plan) == [code]


def test_a_lost_rank_stays_lost():
    """A plan cannot bring back what the previous one has given up."""
    assert codes(BEFORE, shrunk(reshards=())) == ["RHP807", "RHP801"]


def test_a_returned_rank_needs_everything_anew():
    """`returned` lets it come back, and what it held before it was lost counts for nothing."""
    back = msgspec.structs.replace(BEFORE, returned=(7,))
    assert codes(back, shrunk(reshards=())) == ["RHP801"]
    whole = msgspec.structs.replace(
        back, reconfigure=(Reshard(layers=LAST, source=GroupName(0, 1), target=GroupName(1, 1)),)
    )
    assert codes(whole, shrunk(reshards=())) == []
    moved = {move.target for move in transfers(shrunk(reshards=()), whole)}
    assert moved == {7}


def test_whole_tensors_come_from_all_live_ranks_of_their_source():
    """Both members of a new group need the norms of the layers: each asks another rank."""
    gone = msgspec.structs.replace(
        after(lost=(6, 7)), groups=tuple(g for g in BEFORE.groups if g.name != (1, 1))
    )
    back = msgspec.structs.replace(BEFORE, returned=(6, 7), reconfigure=(SHRINK,))
    senders = {(move.source, move.target) for move in transfers(gone, back) if move.replicated}
    assert senders == {(2, 6), (3, 7)}


def test_only_lost_ranks_return():
    """Neither a rank that was there, nor one that is lost now."""
    assert codes(msgspec.structs.replace(BEFORE, returned=(7,))) == ["RHP807"]
    still = msgspec.structs.replace(shrunk(), returned=(7,), reconfigure=())
    assert codes(still, shrunk(reshards=())) == ["RHP807"]
    far = msgspec.structs.replace(BEFORE, returned=(70,))
    assert codes(far, BEFORE) == ["RHP101"]


def test_the_advice_names_a_whole_source():
    """The hint of missing state is a line that would bring it."""
    (finding,) = verify(parse(print_plan(shrunk(reshards=()))), previous=BEFORE)
    assert finding.hint == "`reshard layers=4..7 dp0.pp1 -> dp1.pp1` would"


@pytest.mark.parametrize("field", ["model", "mesh", "batch"])
def test_a_plan_follows_only_one_of_the_same_job(field):
    """Another model, mesh or batch is another job."""
    other = {
        "model": msgspec.structs.replace(BEFORE.model, name="other"),
        "mesh": msgspec.structs.replace(BEFORE.mesh, dp=3),
        "batch": msgspec.structs.replace(BEFORE.batch, tokens=32),
    }
    previous = msgspec.structs.replace(BEFORE, **{field: other[field]})
    assert codes(BEFORE, previous) == ["RHP808"]


def test_without_a_previous_plan_only_the_targets_are_checked():
    """What a source held cannot be known; that the target takes the layers can."""
    plan = shrunk(reshards=(msgspec.structs.replace(SHRINK, layers=LayerRange(2, 5)),))
    found = verify(parse(print_plan(plan)))
    assert [finding.code for finding in found] == ["RHP805"]


def pieces(group: Group, plan: Plan) -> dict[int, set[tuple[int, int]]]:
    """(layer, eighth) of the state of every rank, the slow way: eighths of a layer."""
    del plan
    return {
        rank: {
            (layer, eighth)
            for layer in range(group.sole_layers.first, group.sole_layers.last + 1)
            for eighth in range(8)
            if eighth * group.tp // 8 == index
        }
        for index, rank in enumerate(group.ranks)
    }


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations((1, 2, 4), 2)))
def test_every_member_ends_with_exactly_its_shard(old, new):
    """Held before plus moved covers what the new layout needs; nothing held is moved again."""
    at = GroupName(1, 0)
    before = make_plan(tp=4, dp=2, degrees={at: old})
    line = Reshard(layers=LayerRange(0, 3), source=GroupName(0, 0), target=at)
    plan = msgspec.structs.replace(make_plan(tp=4, dp=2, degrees={at: new}), reconfigure=(line,))
    assert verify(parse(print_plan(plan)), previous=before) == []
    held = {rank: p for g in before.groups for rank, p in pieces(g, before).items()}
    needed = {rank: p for g in plan.groups for rank, p in pieces(g, plan).items()}
    given = {rank: set(p) for rank, p in held.items()}
    for move in transfers(before, plan):
        if move.replicated:
            continue
        width = 8 // move.num_chunks
        moved = {(move.layer, move.chunk * width + eighth) for eighth in range(width)}
        assert moved <= held[move.source]
        assert not moved & given.get(move.target, set())
        given.setdefault(move.target, set()).update(moved)
    assert all(pieces <= given.get(rank, set()) for rank, pieces in needed.items())


def moved(*reshards: Reshard) -> Plan:
    """Ranks 2 and 7 are lost; rank 5, which holds nothing of the last layers, becomes dp1.pp1.

    What it lacks is left in two places: chunk 0 on rank 6 (standby now), chunk 1 on rank 3.
    """
    others = (
        Reshard(layers=LAST, source=GroupName(1, 1), target=GroupName(0, 1)),
        Reshard(layers=LayerRange(0, 3), source=GroupName(0, 0), target=GroupName(1, 0)),
    )
    places = {GroupName(0, 1): (3,), GroupName(1, 0): (4,), GroupName(1, 1): (5,)}
    return after(
        degrees=dict.fromkeys(places, 1), ranks=places, lost=(2, 7), reshards=(*others, *reshards)
    )


FROM_0 = Reshard(layers=LAST, source=GroupName(0, 1), target=GroupName(1, 1))
FROM_1 = Reshard(layers=LAST, source=GroupName(1, 1), target=GroupName(1, 1))


@pytest.mark.parametrize("lines", [(FROM_0, FROM_1), (FROM_1, FROM_0)])
def test_two_groups_may_bring_their_parts_of_a_layer(lines: tuple[Reshard, ...]):
    """Each chunk comes from the first line whose holder of it is alive."""
    plan = moved(*lines)
    assert codes(plan) == []
    pieces = [move for move in transfers(BEFORE, plan) if move.target == 5]
    assert {(m.chunk, m.source) for m in pieces if not m.replicated} == {(0, 6), (1, 3)}
    first = 3 if lines[0] is FROM_0 else 6
    assert {m.source for m in pieces if m.replicated} == {first}
    assert len(pieces) == 4 * 3


def test_one_of_two_needed_groups_is_not_enough():
    """The other half of the state would be missing."""
    assert codes(moved(FROM_0)) == ["RHP804"]
    assert codes(moved(FROM_1)) == ["RHP804"]


def test_a_line_that_an_earlier_one_leaves_nothing_to_bring_is_needless():
    """dp0.pp1 has all that dp1.pp1 lacks, so a second source does nothing."""
    second = msgspec.structs.replace(SHRINK, source=GroupName(1, 1))
    assert codes(shrunk(reshards=(SHRINK, second))) == ["RHP806"]


def looped(*, ranks: tuple[int, ...], reconfigure: tuple[Reshard | Move | Load, ...] = ()) -> Plan:
    """One replica: layers 0..1 and 6..7 on ranks 0,1, layers 2..5 on `ranks`, as two stages."""
    plan = make_plan(tp=2)
    first, second = plan.groups
    outer, inner = (LayerRange(0, 1), LayerRange(6, 7)), (LayerRange(2, 3), LayerRange(4, 5))
    groups = (
        msgspec.structs.replace(first, layers=outer),
        msgspec.structs.replace(second, layers=inner, ranks=ranks),
    )
    return msgspec.structs.replace(
        plan, groups=groups, reconfigure=reconfigure, resume=Resume(step=9)
    )


def test_stages_of_one_group_move_for_themselves():
    """One stage changes seats as it is, the other is read; each rank keeps what it held."""
    before = looped(ranks=(2, 3))
    at = GroupName(0, 1)
    lines = (
        Move(layers=LayerRange(2, 3), source=2, target=4),
        Reshard(layers=LayerRange(4, 4), source=at, target=at),
        Load(layers=LayerRange(5, 5), step=9, target=at),
    )
    plan = looped(ranks=(4, 3), reconfigure=lines)
    parsed, findings = placed(plan), Findings()
    check_targets(parsed, findings)
    check_adaptation(parsed, before, findings)
    assert findings.sorted() == []
    assert {(m.layer, m.source, m.target) for m in transfers(before, plan)} == {
        (2, 2, 4), (3, 2, 4), (4, 2, 4)
    }  # fmt: skip
    assert {(load.layer, load.step, load.target) for load in loads(before, plan)} == {(5, 9, 4)}
    moved = state_moves(before, plan, lambda piece: 10**piece.layer)
    assert [(m.source, m.target, m.num_bytes) for m in moved] == [
        (2, 4, 2 * (10**2 + 10**3 + 10**4)),
        (None, 4, 2 * 10**5),
    ]


def test_the_advice_names_a_saved_version_where_no_group_is_whole():
    """A line per run of layers; the version is that of the resume line."""
    before = looped(ranks=(2, 3))
    plan = msgspec.structs.replace(looped(ranks=(4, 3)), lost=(2,))
    parsed, findings = placed(plan), Findings()
    check_adaptation(parsed, before, findings)
    (finding,) = findings.sorted()
    assert finding.code == "RHP801"
    assert finding.hint == (
        "no group of the previous plan that held them is whole; if version 9 is saved, "
        "`load layers=2..5 step=9 -> dp0.pp1` would"
    )
