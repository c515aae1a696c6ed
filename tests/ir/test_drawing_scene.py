"""What pictures show: every compute instruction once, where and when it runs."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from drawing_cases import healthy, paired, played
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_build import make_plan
from plan_generator import generate

from resihp.compiler.facts import facts_of
from resihp.errors import UserError
from resihp.ir.drawing.scene import MAX_ROWS, scene_of
from resihp.ir.model import GroupName
from resihp.ir.verify.memory import peaks_of

seeds = st.integers(0, 1 << 32)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_every_compute_instruction_is_drawn_once_at_its_time(seed):
    """The two of an overlapped pair at the time of both."""
    known = played(generate(random.Random(seed)))
    for row in scene_of(known).rows:
        lane = known.lanes[row.lane]
        starts, ends = known.timeline.starts[row.lane], known.timeline.ends[row.lane]
        assert [box.at for box in row.boxes] == [
            index for index, instr in enumerate(lane.body) if instr.op.is_compute
        ]
        for box in row.boxes:
            head, last = lane.head_of(box.at), lane.last_of(box.at)
            assert (box.start, box.end) == (starts[head], ends[last])
            assert (box.half > 0) == (head != last)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_boxes_of_a_row_follow_each_other(seed):
    """Only the halves of a pair share their time; nothing is outside of the iteration."""
    scene = scene_of(played(generate(random.Random(seed))))
    for row in scene.rows:
        whole = [box for box in row.boxes if box.half != 2]
        for one, other in pairwise(whole):
            assert one.start <= one.end <= other.start
        assert all(0 <= box.start <= box.end <= scene.length for box in row.boxes)


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_memory_over_time_has_the_peak_that_the_verifier_checks(seed):
    """Whichever replicas are drawn; in order of time, and without work nothing but the state."""
    plan = generate(random.Random(seed))
    known = played(plan)
    peaks = peaks_of(known.lanes, facts_of(plan))
    for replica in {name.replica for name in known.lanes}:
        (panel,) = scene_of(known, [replica]).panels
        for row in panel.rows:
            curve = row.memory
            assert curve is not None
            assert curve.peak_bytes == peaks[row.lane]
            assert list(curve.times) == sorted(curve.times)
            assert curve.state_bytes == min(curve.num_bytes) == curve.num_bytes[-1]


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (4, 8), (3, 7)])
def test_the_bubble_of_1f1b_is_that_of_the_formula(pp, microbatches):
    """(p - 1) / (m + p - 1) for stages that cost the same."""
    scene = scene_of(played(healthy("1f1b", pp=pp, microbatches=microbatches)))
    assert scene.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1))


def test_replicas_that_do_the_same_are_one_panel():
    """Chosen ones are drawn each, with their own ranks."""
    known = played(healthy("1f1b", pp=2, dp=3))
    (panel,) = scene_of(known).panels
    assert panel.alike == (0, 1, 2)
    one, other = scene_of(known, [2, 1, 2]).panels
    assert (one.replica, other.replica) == (1, 2)
    assert [row.group.ranks for row in other.rows] == [(4,), (5,)]
    assert {box.task.home for row in other.rows for box in row.boxes} == {2}


def test_replicas_that_are_not_there_are_refused():
    """A dropped replica runs nothing."""
    known = played(make_plan(dp=3, gone={1: 0}))
    with pytest.raises(UserError, match=r"replica 1 runs nothing .* those that do: 0,2"):
        scene_of(known, [1])


def test_of_many_kinds_those_that_differ_from_the_usual_one_are_drawn():
    """And the usual one; how many are left out is known."""
    pp, dp = 16, 8
    plan = make_plan(pp=pp, dp=dp, tp=2, microbatches=1, degrees={GroupName(6, 3): 1})
    kinds = {replica: (replica,) for replica in range(dp)}
    scene = scene_of(played(plan, kinds=kinds))
    assert [panel.replica for panel in scene.panels] == [0, 1, 2, 6]
    assert len(list(scene.rows)) == MAX_ROWS
    assert scene.num_left_out == dp - 4


def test_both_of_a_pair_are_halves():
    """They have the same time."""
    scene = scene_of(played(paired(healthy("zb-h1", pp=1, microbatches=2))))
    boxes = next(iter(scene.rows)).boxes
    assert {box.half for box in boxes} == {1, 2}
    assert boxes[0].half == 1 and boxes[1].half == 2
    assert (boxes[0].start, boxes[0].end) == (boxes[1].start, boxes[1].end) == (0, 2)
