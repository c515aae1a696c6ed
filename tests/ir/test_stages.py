"""Several stages per group, work on other replicas, pairs, sharded parameters, schedules.

Each rule with a plan that breaks it, the place that is named, and the right plan beside it.
"""

from __future__ import annotations

import pytest
from report_plans import END, edit, ends, found, hints, plan_text

from resihp.ir.parser import parse
from resihp.ir.verify import verify

LOOPED = plan_text(
    "F[0] 0; send_act[0] 0; F[0] 1; send_act[0] 1; recv_act[2] 0; F[2] 0; send_act[2] 0;"
    "recv_act[2] 1; F[2] 1; send_act[2] 1; recv_grad[2] 0; BW[2] 0; send_grad[2] 0;"
    "recv_grad[2] 1; BW[2] 1; send_grad[2] 1; recv_grad[0] 0; BW[0] 0; recv_grad[0] 1; BW[0] 1"
    + ends(0, 2),
    "recv_act[1] 0; F[1] 0; send_act[1] 0; recv_act[1] 1; F[1] 1; send_act[1] 1; recv_act[3] 0;"
    "F[3] 0; recv_act[3] 1; F[3] 1; BW[3] 0; send_grad[3] 0; BW[3] 1; send_grad[3] 1;"
    "recv_grad[1] 0; BW[1] 0; send_grad[1] 0; recv_grad[1] 1; BW[1] 1; send_grad[1] 1" + ends(1, 3),
    layers=("0..1,4..5", "2..3,6..7"),
)
"""Interleaved: stages 0 and 2 on one rank, 1 and 3 on the other."""
BENT = plan_text(
    "F[0] 0; send_act[0] 0; F[0] 1; send_act[0] 1; recv_act[3] 0; F[3] 0; BW[3] 0; send_grad[3] 0;"
    "recv_act[3] 1; F[3] 1; BW[3] 1; send_grad[3] 1; recv_grad[0] 0; BW[0] 0; recv_grad[0] 1;"
    "BW[0] 1" + ends(0, 3),
    "recv_act[1] 0; F[1] 0; F[2] 0; send_act[2] 0; recv_act[1] 1; F[1] 1; F[2] 1; send_act[2] 1;"
    "recv_grad[2] 0; BW[2] 0; BW[1] 0; send_grad[1] 0; recv_grad[2] 1; BW[2] 1; BW[1] 1;"
    "send_grad[1] 1" + ends(1, 2),
    layers=("0..1,6..7", "2..3,4..5"),
)
"""In V shape: stages 0 and 3 on one rank, 1 and 2 on the other."""
UNEVEN = plan_text(
    "F[0] 0; send_act[0] 0; F[0] 1; send_act[0] 1; recv_act[2] 0; F[2] 0; BW[2] 0; send_grad[2] 0;"
    "recv_act[2] 1; F[2] 1; BW[2] 1; send_grad[2] 1; recv_grad[0] 0; BW[0] 0; recv_grad[0] 1;"
    "BW[0] 1" + ends(0, 2),
    "recv_act 0; F 0; send_act 0; recv_act 1; F 1; send_act 1; recv_grad 0; BW 0; send_grad 0;"
    "recv_grad 1; BW 1; send_grad 1" + END,
    layers=("0..0,4..7", "1..3"),
)
"""Two stages on one rank, one between them on the other."""
MOVED = plan_text(
    "F 0; send_act 0; F 1; send_act 1; recv_grad 0; BW 0; recv_grad 1; BW 1" + END,
    "recv_act 0; F 0; BW 0; send_grad 0; recv_act 1; F 1; BW 1; send_grad 1;"
    "recv_act 1@1 <- dp1; F 1@1; BW 1@1; send_grad 1@1 -> dp1" + END,
    "F 0; send_act 0; F 1; send_act 1 -> dp0; recv_grad 0; BW 0; recv_grad 1 <- dp0; BW 1" + END,
    "recv_act 0; F 0; BW 0; send_grad 0" + END,
    dp=2,
)
"""Micro-batch 1 of replica 1 runs its second stage on replica 0."""
LACKING = plan_text(
    "F 0; send_act 0; recv_grad 0; BW 0" + END,
    "recv_act 0; F 0; BW 0; send_grad 0; recv_act 0@1 <- dp1; F 0@1; BW 0@1;"
    "send_grad 0@1 -> dp1" + END,
    "F 0; send_act 0 -> dp0; recv_grad 0 <- dp0; BW 0" + END,
    "",
    dp=2,
    microbatches=1,
    lines=("standby 3",),
)
"""Replica 1 has no second stage; replica 0 runs it."""
OVERLAPPED = edit(
    BENT,
    (
        "recv_act[1] 1; F[1] 1; F[2] 1; send_act[2] 1; recv_grad[2] 0; BW[2] 0",
        "recv_act[1] 1; F[1] 1; recv_grad[2] 0; F[2] 1 & BW[2] 0; send_act[2] 1",
    ),
)
SHARDED = plan_text(
    "gather_params[0]; F[0] 0; gather_params[1]; F[1] 0; BW[1] 0; free_params[1];"
    "free_params[0]; gather_params[0]; BW[0] 0; free_params[0]" + ends(0, 1),
    layers=("0..3,4..7",),
    microbatches=1,
)
"""FSDP: each stage's parameters are gathered before it is computed."""
SCHEDULE = plan_text(
    "F[0] 0; F[0] 1; F[2] 0; F[2] 1; BW[2] 0; BW[2] 1; BW[0] 0; BW[0] 1",
    "F[1] 0; F[1] 1; F[3] 0; B[3] 0; F[3] 1 & W[3] 0; BW[3] 1; BW[1] 0; BW[1] 1",
    layers=("0..1,4..5", "2..3,6..7"),
    level="schedule",
)
RIGHT = {
    "looped": LOOPED,
    "bent": BENT,
    "uneven": UNEVEN,
    "moved": MOVED,
    "lacking": LACKING,
    "overlapped": OVERLAPPED,
    "sharded": SHARDED,
    "schedule": SCHEDULE,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_plans_are_accepted(name):
    """Every shape that the language can write."""
    assert found(RIGHT[name]) == []


WRONG = [
    # --- the stage of an instruction
    (LOOPED, [("F[2] 1", "F[1] 1")],
     [("RHP109", "dp0.pp0: F[1] 1")]),
    (LOOPED, [("reduce_grads[0]", "reduce_grads")],
     [("RHP109", "dp0.pp0: reduce_grads")]),
    (UNEVEN, [("F 0", "F[0] 0")], [("RHP109", "dp0.pp1: F[0] 0")]),
    # --- who sends to whom
    (MOVED, [("send_act 1 -> dp0", "send_act 1 -> dp1")],
     [("RHP414", "dp1.pp0: send_act 1 -> dp1")]),
    (MOVED, [("recv_act 1@1 <- dp1", "recv_act 1@1")], [("RHP414", "dp0.pp1: recv_act 1@1")]),
    (MOVED, [("recv_grad 1 <- dp0", "recv_grad 1 <- dp9")],
     [("RHP102", "dp1.pp0: recv_grad 1 <- dp9")]),
    (MOVED, [("send_act 1 -> dp0", "")], [("RHP401", "dp0.pp1: recv_act 1@1 <- dp1")]),
    (MOVED, [("recv_act 1@1 <- dp1", "")], [("RHP402", "dp1.pp0: send_act 1 -> dp0")]),
    (MOVED, [("send_act 1 -> dp0", ""), ("recv_act 1@1 <- dp1", "")],
     [("RHP404", "dp0.pp1: F 1@1")]),
    (MOVED, [("send_act 1 -> dp0", "send_act 1"), ("recv_act 1@1 <- dp1", "")],
     [("RHP414", "dp1.pp0: send_act 1")]),
    (MOVED, [("F 1@1; BW 1@1", "F 1@1; BW 1@1; F 0@1")], [("RHP302", "dp1.pp1: F 0")]),
    (MOVED, [("send_grad 1@1 -> dp1", "send_grad 1@1 -> dp1; send_act 1@1")],
     [("RHP407", "dp0.pp1: send_act 1@1")]),
    (LACKING, [("recv_act 0@1 <- dp1; F 0@1; BW 0@1; send_grad 0@1 -> dp1", "")],
     [("RHP301", "stream dp=0 pp=1 {")]),
    # --- what is handed over in place
    (BENT, [("F[1] 0; F[2] 0", "F[1] 0; send_act[1] 0; recv_act[2] 0; F[2] 0")],
     [("RHP415", "dp0.pp1: send_act[1] 0")]),
    (BENT, [("F[1] 0; F[2] 0", "F[2] 0; F[1] 0")], [("RHP416", "dp0.pp1: F[2] 0")]),
    (BENT, [("BW[2] 0; BW[1] 0", "BW[1] 0; BW[2] 0")], [("RHP416", "dp0.pp1: BW[1] 0")]),
    # --- one channel carries everything
    (LOOPED, [("recv_act[1] 1; F[1] 1; send_act[1] 1", "F[1] 1; send_act[1] 1; recv_act[1] 1")],
     [("RHP405", "dp0.pp1: recv_act[1] 1")]),
    (LOOPED, [("recv_act[2] 1; F[2] 1", "recv_grad[2] 0; recv_act[2] 1; F[2] 1"),
              ("send_act[2] 1; recv_grad[2] 0", "send_act[2] 1")],
     [("RHP412", "dp0.pp0: recv_grad[2] 0")]),
    # --- pairs
    (OVERLAPPED, [("F[1] 1; recv_grad[2] 0; F[2] 1 & BW[2] 0",
                   "recv_grad[2] 0; F[1] 1 & F[2] 1; BW[2] 0")],
     [("RHP110", "dp0.pp1: F[1] 1 & F[2] 1")]),
    (OVERLAPPED, [("recv_grad[2] 1; BW[2] 1; BW[1] 1", "recv_grad[2] 1; BW[2] 1 & BW[1] 1")],
     [("RHP110", "dp0.pp1: BW[2] 1 & BW[1] 1")]),
    (OVERLAPPED, [("recv_act[3] 1; F[3] 1; BW[3] 1", "recv_act[3] 1; F[3] 1 & BW[3] 1")],
     [("RHP110", "dp0.pp0: F[3] 1 & BW[3] 1")]),
    # --- parameters
    (SHARDED, [("gather_params[0]; BW[0] 0", "BW[0] 0")], [("RHP417", "dp0.pp0: BW[0] 0")]),
    (SHARDED, [("F[1] 0; BW[1] 0; free_params[1]", "F[1] 0; free_params[1]; BW[1] 0")],
     [("RHP417", "dp0.pp0: BW[1] 0")]),
    (SHARDED, [("gather_params[1]; F[1] 0", "F[1] 0")], [("RHP417", "dp0.pp0: F[1] 0")]),
    (SHARDED, [("free_params[0]; gather_params[0]", "gather_params[0]")],
     [("RHP418", "dp0.pp0: gather_params[0]")]),
    (SHARDED, [("BW[0] 0; free_params[0]", "BW[0] 0")], [("RHP418", "dp0.pp0: gather_params[0]")]),
    (SHARDED, [("free_params[1]", "free_params[1]; free_params[1]")],
     [("RHP418", "dp0.pp0: free_params[1]")]),
    # --- every stage is reduced
    (LOOPED, [("reduce_grads[2]", "")], [("RHP701", "stream dp=0 pp=0 {")]),
    (LOOPED, [("reduce_grads[2]", "reduce_grads[2]; reduce_grads[2]")],
     [("RHP703", "dp0.pp0: reduce_grads[2]")]),
    (LOOPED, [("BW[0] 1; reduce_grads[0]", "reduce_grads[0]; BW[0] 1")],
     [("RHP704", "dp0.pp0: BW[0] 1")]),
    (LOOPED, [("reduce_grads[2]; step", "step; reduce_grads[2]")], [("RHP705", "dp0.pp0: step")]),
    # --- schedules
    (SCHEDULE, [("F[0] 1", "")], [("RHP301", "dp0.pp0: BW[0] 1")]),
    (SCHEDULE, [("F[2] 0; F[2] 1; BW[2] 0; BW[2] 1", "F[2] 0; BW[2] 0; F[2] 1; BW[2] 1"),
                ("F[3] 0; B[3] 0; F[3] 1 & W[3] 0", "F[3] 0; F[3] 1; B[3] 0; W[3] 0")],
     [("RHP501", "dp0.pp0: BW[2] 0")]),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "edits", "expected"), WRONG)
def test_one_mistake_gives_its_code_at_its_place(plan, edits, expected):
    """And nothing else."""
    assert sorted(found(edit(plan, *edits))) == sorted(expected)


def test_work_of_other_stages_may_follow_a_reduction():
    """Stage 2 is reduced before stage 0 has computed its gradients."""
    early = edit(LOOPED, ("reduce_grads[2]", ""),
                 ("send_grad[2] 1", "send_grad[2] 1; reduce_grads[2]"))  # fmt: skip
    assert found(early) == []


def test_stages_of_a_group_ascend_and_cover_the_model():
    """Descending ranges, a gap and an overlap between groups."""
    where = "group dp0.pp0 ranks=0 layers="
    for layers in ("0..1,4..6", "0..2,4..5", "1..1,4..5"):
        codes = found(LOOPED.replace(f"{where}0..1,4..5", f"{where}{layers}"))
        assert {code for code, _ in codes} == {"RHP205"}, layers
    assert ("RHP205", f"{where}4..5,0..1") in found(LOOPED.replace("0..1,4..5", "4..5,0..1"))


def test_more_stages_than_can_be_looked_at_are_refused_at_once():
    """Stages times replicas, like ranks, have a bound."""
    text = LOOPED.replace("mesh tp=1 pp=2 dp=1", "mesh tp=1 pp=2 dp=524288")
    assert found(text) == [("RHP108", "mesh tp=1 pp=2 dp=524288")]


def test_hints_say_what_to_write_at_either_end():
    """Stage, home and peer as the stream there must write them."""
    lost = edit(MOVED, ("send_act 1 -> dp0", ""), ("recv_act 1@1 <- dp1", ""))
    assert hints(lost) == ["add `send_act 1 -> dp0` there and `recv_act 1@1 <- dp1` here"]
    astray = edit(MOVED, ("send_act 1 -> dp0", "send_act 1"), ("recv_act 1@1 <- dp1", ""))
    assert hints(astray) == ["write `send_act 1 -> dp0`, and add `recv_act 1@1 <- dp1` there"]
    staged = edit(BENT, ("send_act[0] 1", ""), ("recv_act[1] 1", ""))
    assert hints(staged) == ["add `send_act[0] 1` there and `recv_act[1] 1` here"]
    last = "F 0; BW 0; send_grad 0; reduce_grads; step"
    named = edit(MOVED, (f"recv_act 0; {last}", f"recv_act 0 <- dp0; {last}"))
    assert hints(named) == ["write `recv_act 0`"]
    (finding,) = verify(parse(edit(UNEVEN, ("reduce_grads[0]", "reduce_grads; reduce_grads[0]"))))
    assert finding.hint == "write `reduce_grads[0]` or `reduce_grads[2]`"
