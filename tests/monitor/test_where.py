"""Who waits for whom, told from where the heads of all streams are."""

from __future__ import annotations

import msgspec
import pytest

from resihp.compiler import initial_plan
from resihp.ir.expand import expand
from resihp.ir.model import Batch, Instr, Mesh, ModelShape, Op, Plan
from resihp.ir.printer import print_plan
from resihp.monitor.run_dir import RunDir
from resihp.monitor.where import describe, report, standings
from resihp.wire.messages import At, Positions

SHAPE = ModelShape(name="tiny", layers=4, hidden=64, heads=4, kv_heads=4, ffn=96, vocab=272)


def plan_of(tp: int = 1, pp: int = 2, dp: int = 1) -> Plan:
    return initial_plan(SHAPE, Mesh(tp=tp, pp=pp, dp=dp), Batch(microbatches=4, tokens=16))


def index_of(plan: Plan, rank: int, op: Op, microbatch: int | None = None) -> int:
    return next(
        index
        for index, instr in enumerate(expand(plan, rank).instrs)
        if (instr.op, instr.microbatch) == (op, microbatch)
    )


def at(**fields) -> At:
    return At(generation=1, runs=True, doing="runs", **{"step": 3, **fields})


def computing(plan: Plan, rank: int, op: Op, number: int, **fields) -> At:
    return at(compute=index_of(plan, rank, op, number), **fields)


def lacking(plan: Plan, rank: int, op: Op, number: int, recv: Op) -> At:
    return at(
        compute=index_of(plan, rank, op, number),
        compute_waits=True,
        receives=(index_of(plan, rank, recv, number),),
    )


def test_a_rank_waits_for_the_one_that_computes_its_input():
    """In the words of the plan, with where the other one is."""
    plan = plan_of()
    found = standings(
        plan,
        {0: computing(plan, 0, Op.F, 1), 1: lacking(plan, 1, Op.F, 1, Op.RECV_ACT)},
    )
    assert found[0].does == "computes `F 1`"
    assert found[0].waits_for == ()
    assert found[1].does == "waits for `recv_act 1` from dp0.pp0, whose rank 0 is at `F 1`"
    assert found[1].waits_for == (0,)


def test_what_was_sent_meanwhile_is_nobody_s_turn():
    """The other rank answered later, when it was past it, in this iteration or the next."""
    plan = plan_of()
    waiting = lacking(plan, 0, Op.BW, 1, Op.RECV_GRAD)
    last = index_of(plan, 1, Op.STEP)
    for other in (computing(plan, 1, Op.F, 2), at(comm=last), at(step=4)):
        found = standings(plan, {0: waiting, 1: other})
        assert found[0].does == "waits for `recv_grad 1` from dp0.pp1, which has sent it"
        assert found[0].waits_for == ()
    found = standings(plan, {0: waiting, 1: computing(plan, 1, Op.BW, 1)})
    assert found[0].waits_for == (1,)


def with_pair(plan: Plan, op: Op, other: Op) -> Plan:
    """`op` of micro-batch 1 on the second position paired with `other` of 0, inputs before both."""
    (stream,) = (each for each in plan.streams if each.pp == 1)
    body = list(stream.body)

    def take(wanted: Op, number: int) -> Instr:
        (found,) = (each for each in body if (each.op, each.microbatch) == (wanted, number))
        body.remove(found)
        return found

    place = next(i for i, each in enumerate(body) if (each.op, each.microbatch) == (op, 1))
    first = msgspec.structs.replace(take(op, 1), paired=True)
    pair = [take(Op.RECV_GRAD, 0), first, take(other, 0)]
    streams = [
        msgspec.structs.replace(stream, body=(*body[:place], *pair, *body[place:]))
        if each is stream
        else each
        for each in plan.streams
    ]
    return msgspec.structs.replace(plan, streams=tuple(streams))


def test_a_pair_waits_for_the_ranks_of_both():
    """It starts when both have their inputs."""
    plan = with_pair(plan_of(pp=3), Op.F, Op.BW)
    lacks = tuple(index_of(plan, 1, op, n) for op, n in ((Op.RECV_ACT, 1), (Op.RECV_GRAD, 0)))
    waiting = at(
        compute=index_of(plan, 1, Op.F, 1), compute_waits=True, receives=tuple(sorted(lacks))
    )
    found = standings(
        plan,
        {0: computing(plan, 0, Op.F, 1), 1: waiting, 2: computing(plan, 2, Op.BW, 0)},
    )
    assert found[1].does == (
        "waits for `recv_act 1` from dp0.pp0, whose rank 0 is at `F 1` and "
        "`recv_grad 0` from dp0.pp2, whose rank 2 is at `BW 0`"
    )
    assert found[1].waits_for == (0, 2)


def test_a_member_waits_for_those_of_its_group_that_are_behind():
    """Inside an instruction that all members run together."""
    plan = plan_of(tp=2)
    found = standings(
        plan,
        {
            0: computing(plan, 0, Op.F, 1),
            1: computing(plan, 1, Op.F, 0),
            2: lacking(plan, 2, Op.F, 0, Op.RECV_ACT),
            3: lacking(plan, 3, Op.F, 0, Op.RECV_ACT),
        },
    )
    assert found[0].waits_for == (1,)
    assert found[1].waits_for == ()
    assert found[3].waits_for == (1,)


def test_a_reduction_waits_for_the_ranks_of_its_stage_only():
    """One that is still computing, and not those of other stages."""
    plan = plan_of(dp=2)
    reduce = index_of(plan, 0, Op.REDUCE_GRADS)
    behind = computing(plan, 2, Op.BW, 3)
    others = {rank: computing(plan, rank, Op.BW, 3) for rank in (1, 3)}
    found = standings(plan, {0: at(comm=reduce), 2: behind, **others})
    assert found[0].does == "waits at `reduce_grads` for rank 2, which is at `BW 3`"
    assert found[0].waits_for == (2,)


def test_a_step_waits_for_all_that_are_not_there():
    """Those that do not answer count as not there."""
    plan = plan_of(dp=2)
    step = [index_of(plan, rank, Op.STEP) for rank in range(4)]
    found = standings(plan, {0: at(comm=step[0]), 1: at(comm=step[1])})
    assert found[0].waits_for == found[1].waits_for == (2, 3)
    assert "rank 2, which does not answer (and 1 more)" in found[0].does


def test_a_rank_that_is_a_step_ahead_waits_for_nobody_behind_it():
    """Its own iteration decides."""
    plan = plan_of(dp=2)
    step = index_of(plan, 0, Op.STEP)
    found = standings(
        plan, {0: at(comm=step), 1: at(comm=step, step=4), 2: at(step=4), 3: at(step=4)}
    )
    assert found[0].waits_for == ()


def test_the_report_ends_with_who_holds_the_others_up():
    """Followed from rank to rank."""
    plan = plan_of(pp=3)
    lines = list(
        describe(
            plan,
            {
                0: computing(plan, 0, Op.F, 1, since_s=12.34),
                1: lacking(plan, 1, Op.F, 1, Op.RECV_ACT),
                2: lacking(plan, 2, Op.F, 1, Op.RECV_ACT),
            },
        )
    )
    assert lines[0] == "rank 0  dp0.pp0  computes `F 1`, for 12.3 s"
    assert lines[-1] == ("ranks 1,2 wait in the end for rank 0, which computes `F 1`, for 12.3 s")


def hurried(plan: Plan) -> Plan:
    """The second position runs F of micro-batch 2 before it gives back a gradient."""
    (stream,) = (each for each in plan.streams if each.pp == 1)
    early = [each for each in stream.body if (each.op, each.microbatch) == (Op.F, 2)]
    rest = [each for each in stream.body if each not in early]
    place = next(i for i, each in enumerate(rest) if (each.op, each.microbatch) == (Op.BW, 0))
    body = (*rest[:place], *early, *rest[place:])
    changed = msgspec.structs.replace(stream, body=body)
    streams = tuple(changed if each is stream else each for each in plan.streams)
    return msgspec.structs.replace(plan, streams=streams)


def test_a_circle_is_named():
    """Both ranks wait for what the other would send next; no plan that is verified does that."""
    plan = hurried(plan_of())
    lines = list(
        describe(
            plan,
            {
                0: lacking(plan, 0, Op.BW, 0, Op.RECV_GRAD),
                1: lacking(plan, 1, Op.F, 2, Op.RECV_ACT),
            },
        )
    )
    assert lines[-1] == "in a circle: rank 0 -> rank 1 -> rank 0"


@pytest.mark.parametrize(("since_s", "is_told"), [(0.2, True), (20.0, False)])
def test_waits_that_may_be_over_are_told_as_such(tmp_path, since_s, is_told):
    """Young ones: ranks answer at different moments."""
    plan = plan_of()
    (tmp_path / "plans").mkdir()
    RunDir(tmp_path).plan(1, print_plan(plan), "start")
    computes = computing(plan, 0, Op.F, 1)
    waits = msgspec.structs.replace(lacking(plan, 1, Op.F, 1, Op.RECV_ACT), since_s=since_s)
    positions = Positions(
        generation=1,
        phase="running",
        alive=(0, 1),
        at={0: computes, 1: waits},
        heard_s={},
        beats={},
    )
    lines = list(report(tmp_path, positions))
    assert any("rank 1 waits in the end for rank 0" in line for line in lines)
    assert ("ask again" in lines[-1]) == is_told


@pytest.mark.parametrize("has_plan", [True, False])
def test_ranks_that_are_out_are_told_with_what_becomes_of_them(tmp_path, has_plan):
    """Also where no plan is written yet."""
    plan = plan_of()
    if has_plan:
        (tmp_path / "plans").mkdir()
        RunDir(tmp_path).plan(1, print_plan(plan), "start")
    positions = Positions(
        generation=1,
        phase="running",
        alive=(0, 1),
        at={0: computing(plan, 0, Op.F, 1)},
        heard_s={},
        beats={},
        out={3: "lost; its executor will be started again"},
    )
    lines = list(report(tmp_path, positions))
    assert "rank 3  out  lost; its executor will be started again" in lines


@pytest.mark.parametrize("doing", ["builds groups", "stands by"])
def test_ranks_that_run_nothing_say_what_they_do(doing):
    """Between generations, and standby ranks."""
    plan = plan_of()
    still = At(generation=1, runs=False, doing=doing)
    assert list(describe(plan, {0: still}, {1: "does not answer"})) == [
        f"rank 0  dp0.pp0  {doing}, for 0.0 s",
        "rank 1  dp0.pp1  does not answer",
    ]
