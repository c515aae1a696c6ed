"""The line that tells the operator what a plan changed."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from coordinator_cases import job_of

from resihp.ir.model import Group, Instr, LayerRange, Op, Plan, Stream
from resihp.monitor.layout_line import layout_line
from resihp.monitor.planner import Planner

PLAN = Planner(job_of(tp=2, pp=2)).initial().plan


def without(places: Collection[tuple[int, int]]) -> Plan:
    groups = tuple(group for group in PLAN.groups if group.name not in places)
    return msgspec.structs.replace(PLAN, groups=groups)


def test_a_healthy_layout_is_the_same_layout():
    """Nothing to tell."""
    assert layout_line(PLAN) == "the healthy layout"


def test_a_smaller_degree_and_what_is_left_over_are_told():
    """Group by group."""
    first = msgspec.structs.replace(PLAN.groups[0], ranks=(0,))
    plan = msgspec.structs.replace(PLAN, groups=(first, *PLAN.groups[1:]), standby=(1,))
    assert layout_line(plan) == "dp0.pp0 TP 2 -> 1, standby 1"


def test_a_place_without_a_group_is_gone_and_a_replica_without_any_is_dropped():
    """One word each."""
    assert layout_line(without({(1, 1)})) == "dp1.pp1 gone"
    assert layout_line(without({(1, 0), (1, 1)})) == "dp1 dropped"


def test_uneven_stages_are_told():
    """By their numbers of layers."""
    shares = (LayerRange(0, 0), LayerRange(1, 3))
    groups = tuple(
        Group(replica=g.replica, pp=g.pp, ranks=g.ranks, layers=(shares[g.pp],))
        for g in PLAN.groups
    )
    assert layout_line(msgspec.structs.replace(PLAN, groups=groups)) == "layers 1+3"


def test_micro_batches_that_visit_another_replica_are_counted():
    """Each stage of each one."""
    stream = Stream(
        replicas=(0,), pp=0, body=(Instr(Op.F, 0), Instr(Op.F, 0, 1), Instr(Op.F, 1, 1))
    )
    plan = msgspec.structs.replace(PLAN, streams=(stream,))
    assert layout_line(plan) == "2 stage runs of micro-batches moved"
