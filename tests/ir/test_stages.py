"""Several stages per group, work on other replicas, pairs, sharded parameters, schedules.

Each rule with a plan that breaks it, the place that is named, and the right plan beside it.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from plan_build import make_plan
from plan_generator import generate
from plan_mutator import mutate
from report_plans import END, edit, found, plan_text

from resihp.errors import PlanSyntaxError
from resihp.ir.lanes import alike, lanes_of
from resihp.ir.model import Plan, Stream
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.source import Parsed
from resihp.ir.timeline import UNIT_COST, Player
from resihp.ir.transport import parse_transport
from resihp.ir.verify import verify
from resihp.ir.verify.waits import circles


def ends(*stages: int) -> str:
    """What a stream of these stages ends with."""
    return "".join(f"; reduce_grads[{stage}]" for stage in stages) + "; step"


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
     [("RHP109", "dp0.pp0: F[1] 1"), ("RHP301", "dp0.pp0: BW[2] 1")]),
    (LOOPED, [("reduce_grads[0]", "reduce_grads")],
     [("RHP109", "dp0.pp0: reduce_grads"), ("RHP701", "stream dp=0 pp=0 {")]),
    (UNEVEN, [("F 0", "F[0] 0")], [("RHP109", "dp0.pp1: F[0] 0"), ("RHP301", "dp0.pp1: BW 0")]),
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


def hints(text: str) -> list[str | None]:
    return [finding.hint for finding in verify(parse(text))]


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


# --- progress


STUCK = plan_text(
    "F 0; send_act 0; recv_grad 0; F 1 & BW 0; send_act 1; recv_grad 1; BW 1" + END,
    "recv_act 0; F 0; recv_act 1; F 1; BW 0; send_grad 0; BW 1; send_grad 1" + END,
)
"""`F 1` of stage 0 could run, but for `BW 0`, which waits for what `F 1` of stage 1 holds up."""


def test_a_pair_waits_for_the_inputs_of_both():
    """Apart the two run; overlapped they wait for each other through the other stage."""
    assert [code for code, _ in found(STUCK)] == ["RHP501"]
    apart = edit(STUCK, ("F 1 & BW 0; send_act 1", "F 1; send_act 1; BW 0"))
    early = edit(
        STUCK, ("recv_act 1; F 1; BW 0; send_grad 0", "BW 0; send_grad 0; recv_act 1; F 1")
    )
    assert found(apart) == found(early) == []
    schedule = plan_text("F 0; F 1 & BW 0; BW 1", "F 0; F 1; BW 0; BW 1", level="schedule")
    assert [code for code, _ in found(schedule)] == ["RHP501"]
    assert found(edit(schedule, ("F 1 & BW 0", "F 1; BW 0"))) == []


def test_a_deadlock_is_told_with_the_whole_pair():
    """The pair stands for both of its instructions, and no swap takes it apart."""
    (finding,) = verify(parse(STUCK))
    assert [note.message for note in finding.related] == [
        "dp0.pp0 waits here for `send_grad 0` of dp0.pp1 (line 24), which comes after `F 1` "
        "(line 22)",
        "dp0.pp1 waits here for `send_act 1` of dp0.pp0 (line 12), which comes after "
        "`F 1 & BW 0` (line 11)",
    ]


def test_no_swap_takes_a_pair_apart():
    """One is proposed where the two stand alone, not where they are overlapped."""
    text = plan_text(
        "F 0; F 1; recv_grad 0; BW 0; send_act 0; send_act 1; recv_grad 1; BW 1" + END,
        "recv_act 0; F 0; BW 0; send_grad 0; recv_act 1; F 1; BW 1; send_grad 1" + END,
    )
    assert hints(text) == ["swap `BW 0` (line 11) and `send_act 0` (line 12): the circle is gone"]
    (hint,) = hints(edit(text, ("F 1; recv_grad 0; BW 0", "recv_grad 0; F 1 & BW 0")))
    assert hint is not None
    assert hint.startswith("a posted send never waits")


def test_a_schedule_that_cannot_run_is_told_in_computations():
    """Who waits for whose F or BW; one that waits itself is told as such."""
    text = plan_text("F 0; F 1; BW 1; BW 0", "F 0; BW 0; F 1; BW 1", level="schedule")
    assert found(text) == []
    text = plan_text("F 0; BW 0; F 1; BW 1", "F 0; F 1; BW 0; BW 1", level="schedule")
    (finding,) = verify(parse(text))
    assert [note.message for note in finding.related] == [
        "dp0.pp0 waits here for `BW 0` of dp0.pp1 (line 16), which comes after `F 1` (line 15)",
        "dp0.pp1 waits here for `F 1` of dp0.pp0 (line 10), which comes after `BW 0` (line 9)",
    ]


def test_a_wait_for_what_waits_itself():
    """The awaited computation is the one at which its stream is stuck."""
    text = plan_text(
        "F[0] 0; F[2] 1; F[2] 0; BW[2] 0; F[0] 1; BW[2] 1; BW[0] 0; BW[0] 1",
        "F[1] 0; F[1] 1; BW[1] 0; BW[1] 1",
        layers=("0..1,4..7", "2..3"),
        level="schedule",
    )
    (finding,) = verify(parse(text))
    assert [note.message for note in finding.related] == [
        "dp0.pp0 waits here for `F[1] 1` of dp0.pp1 (line 19), which waits itself",
        "dp0.pp1 waits here for `F[0] 1` of dp0.pp0 (line 12), which comes after `F[2] 1` (line 9)",
    ]


def test_ranks_in_a_loop_pass_pair_and_deadlock_under_rank():
    """Each lists the receive from one neighbour before the send to the other, once around."""
    streams = [
        f"recv_act[{s}] 0; F[{s}] 0; recv_act[{s + 3}] 0; send_act[{s}] 0; F[{s + 3}] 0;"
        f"send_act[{s + 3}] 0; recv_grad[{s + 3}] 0; BW[{s + 3}] 0; send_grad[{s + 3}] 0;"
        f"recv_grad[{s}] 0; BW[{s}] 0; send_grad[{s}] 0" + ends(s, s + 3)
        for s in range(3)
    ]
    streams[0] = streams[0].replace("recv_act[0] 0;", "").replace("send_grad[0] 0;", "")
    streams[0] = streams[0].replace("; send_grad[0] 0", "")
    streams[2] = streams[2].replace("send_act[5] 0; recv_grad[5] 0; ", "").replace(
        "send_act[5] 0; recv_grad[5] 0;", "")  # fmt: skip
    layers = ("0..0,3..3", "1..1,4..4", "2..2,5..7")
    text = plan_text(*streams, layers=layers, microbatches=1)
    assert found(text) == found(text, transport="pair") == []
    assert {code for code, _ in found(text, transport="rank")} == {"RHP501"}
    in_order = text
    for s in range(3):
        in_order = edit(in_order, (f"recv_act[{s + 3}] 0; send_act[{s}] 0",
                                   f"send_act[{s}] 0; recv_act[{s + 3}] 0"))  # fmt: skip
    assert found(in_order, transport="rank") == []


def test_a_blocking_send_holds_up_the_reduction_of_another_stage():
    """Accepted by rank, refused by eager=0: replica 0 reduces stage 1 before its work is taken."""
    text = plan_text(
        "F[0] 0; send_act[0] 0 -> dp1; reduce_grads[1]; recv_grad[0] 0 <- dp1; BW[0] 0;"
        "reduce_grads[0]; step",
        "F[0] 0; F[1] 0; BW[1] 0; BW[0] 0; recv_act[1] 0@0 <- dp0; F[1] 0@0; BW[1] 0@0;"
        "send_grad[1] 0@0 -> dp0" + ends(1, 0),
        layers=("0..3,4..7",),
        dp=2,
        microbatches=1,
    )
    assert found(text, transport="rank") == found(text) == []
    late = edit(text, ("BW[1] 0@0; send_grad[1] 0@0 -> dp0; reduce_grads[1]",
                       "BW[1] 0@0; reduce_grads[1]; send_grad[1] 0@0 -> dp0"))  # fmt: skip
    assert [code for code, _ in found(late)] == ["RHP704"]
    assert {code for code, _ in found(text, transport="eager=0")} == {"RHP501"}
    posted = edit(text, ("reduce_grads[1]; recv_grad[0] 0 <- dp1",
                         "recv_grad[0] 0 <- dp1; reduce_grads[1]"))  # fmt: skip
    assert found(posted, transport="eager=0") == []


def test_the_plan_names_its_transport_unless_the_caller_does():
    """1F1B passes edge and hangs under pair."""
    text = plan_text("F 0; send_act 0; F 1; send_act 1; recv_grad 0; BW 0; recv_grad 1; BW 1" + END,
                     "recv_act 0; F 0; BW 0; send_grad 0; recv_act 1; F 1; BW 1; send_grad 1" + END,
                     lines=("transport pair",))  # fmt: skip
    assert [code for code, _ in found(text)] == ["RHP501"]
    assert found(text, transport="edge") == []


def test_a_search_that_is_cut_short_still_finds_a_circle():
    """Whatever is stuck has one; the first of the full search is as short as any."""
    num_stuck = 0
    for seed in range(300):
        rng = random.Random(seed)
        plan, _ = mutate(generate(rng), rng, ("disorder", "swap_work", "swap_reduces", "drift"))
        transport = parse_transport(rng.choice(("edge", "pair", "rank", "eager=0")))
        lanes = lanes_of(plan)
        player = Player(lanes, UNIT_COST, transport, dict.fromkeys(lanes, 1))
        stuck = player.run().stuck
        found_at_once = list(circles(player, stuck, most_looks=0))
        all_found = list(circles(player, stuck))
        assert bool(found_at_once) == bool(all_found) == bool(stuck)
        for circle in (*found_at_once, *all_found):
            sources, targets = ([at.source for at in circle], [at.target for at in circle])
            assert targets == [*sources[1:], sources[0]]
            assert len(set(sources)) == len(sources)
        if stuck:
            assert min(map(len, all_found)) == len(all_found[0]) <= len(found_at_once[0])
            num_stuck += 1
    assert num_stuck > 60


# --- replicas that are alike


def apart(parsed: Parsed) -> Parsed:
    """The same with a body of its own for each replica, so that none counts as like another."""
    streams = [
        (Stream(replicas=(replica,), pp=stream.pp, body=tuple(i for i in stream.body)), source)
        for stream, source in zip(parsed.plan.streams, parsed.streams, strict=True)
        for replica in stream.replicas
    ]
    return msgspec.structs.replace(
        parsed,
        plan=msgspec.structs.replace(parsed.plan, streams=tuple(stream for stream, _ in streams)),
        streams=tuple(source for _, source in streams),
    )


def shared_plan(rng: random.Random) -> Plan:
    plan = generate(rng)
    if rng.random() < 0.6:
        plan = make_plan(
            pp=rng.choice((1, 2, 3)),
            dp=rng.choice((2, 3, 4)),
            microbatches=2,
            share=True,
            gone=rng.choice((None, {1: 0})),
        )
    return mutate(plan, rng)[0] if rng.random() < 0.8 else plan


def test_looking_at_one_of_many_replicas_finds_what_looking_at_all_does():
    """The same codes at the same places; deadlocks may be told through other replicas."""
    num_shared = 0
    for seed in range(200):
        plan = shared_plan(random.Random(seed))
        try:
            parsed = parse(print_plan(plan))
        except PlanSyntaxError:  # three overlapped in a row
            continue
        all_apart = apart(parsed)
        num_shared += len(alike(parsed.plan)) < len(alike(all_apart.plan))
        here, there = (
            {
                (f.code, None if f.code == "RHP501" else f.span)
                for f in verify(one, quick_proof=False)
            }
            for one in (parsed, all_apart)
        )
        assert here == there, seed
    assert num_shared > 50


def test_a_replica_is_alone_if_it_has_to_do_with_another():
    """By a home, by a peer, or by being named; the others stay together."""
    plan = make_plan(pp=2, dp=5, microbatches=1, share=True)
    assert alike(plan) == {0: (0, 1, 2, 3, 4)}
    assert alike(parse(MOVED).plan) == {0: (0,), 1: (1,)}
    body = plan.streams[0].body
    named = tuple(msgspec.structs.replace(i, peer=3) if i.op.is_transfer else i for i in body)
    streams = (
        msgspec.structs.replace(plan.streams[0], replicas=(0, 2, 3, 4)),
        Stream(replicas=(1,), pp=0, body=named),
        plan.streams[1],
    )
    assert alike(msgspec.structs.replace(plan, streams=streams)) == {
        0: (0, 2, 4),
        1: (1,),
        3: (3,),
    }
