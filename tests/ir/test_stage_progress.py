"""Progress of plans with several stages per group, pairs, other peers; and of schedules."""

from __future__ import annotations

import itertools
import random
import re

from plan_build import make_plan
from plan_generator import as_schedule, generate
from plan_mutator import mutate
from report_plans import END, edit, ends, found, hints, plan_text, written

from resihp.ir.lanes import lanes_of
from resihp.ir.model import GroupName
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.timeline import UNIT_COST, Player, play
from resihp.ir.transport import parse_transport
from resihp.ir.verify import verify
from resihp.ir.verify.waits import circles

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


def test_a_pair_takes_as_long_as_both():
    """And what follows waits for both; others see what it makes when it has ended."""
    text = plan_text("F 0; F 1 & BW 0; BW 1", level="schedule")
    assert play(lanes_of(parse(text).plan)).makespan == 1 + (1 + 2) + 2
    backward = "; BW 0; BW 1; BW 2"
    streams = ("F 0; F 1 & F 2" + backward, "F 0; F 1; F 2" + backward)
    text = plan_text(*streams, microbatches=3, level="schedule")
    starts = play(lanes_of(parse(text).plan)).starts[GroupName(0, 1)]
    assert starts[:3] == [1, 3, 4]


def test_a_schedule_takes_as_long_as_its_plan():
    """Where every tensor is sent as soon as it is made, and transfers take no time."""
    for pp, order, split in itertools.product((1, 2, 4), ("1f1b", "gpipe"), (True, False)):
        plan = make_plan(pp=pp, microbatches=5, order=order, split=split)
        assert play(lanes_of(as_schedule(plan))).makespan == play(lanes_of(plan)).makespan


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


def test_a_swap_that_is_proposed_mends_the_plan():
    """Exchanging the two lines leaves fewer deadlocks and brings nothing else."""
    num_swaps = 0
    for seed in range(250):
        rng = random.Random(seed)
        plan, _ = mutate(generate(rng), rng, ("disorder", "swap_work", "drift", "near"))
        parsed, transport = written(plan), rng.choice(("edge", "pair", "rank", "eager=0"))
        before = [] if parsed is None else verify(parsed, transport=transport)
        for finding in before:
            swap = re.fullmatch(
                r"swap `.*` \(line (\d+)\) and `.*` \(line (\d+)\): the circle is gone",
                finding.hint or "",
            )
            if swap:
                lines = print_plan(plan).split("\n")
                first, second = (int(line) - 1 for line in swap.groups())
                lines[first], lines[second] = lines[second], lines[first]
                after = verify(parse("\n".join(lines)), transport=transport)
                assert {f.code for f in after} <= {f.code for f in before}
                assert len(after) < len(before)
                num_swaps += 1
    assert num_swaps > 10
