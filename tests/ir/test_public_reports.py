"""Public bug reports of pipelines, as far as plans are to blame: refused for what was reported.

`public_reports.md` has the table of all reports, with the test that has each one's symptom. A
test shows the plan that fails as the report tells, the finding with its code and line, and a
mended plan that is accepted.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from report_plans import END, edit, found, plan_text

from resihp.compiler.facts import facts_of
from resihp.errors import PlanSyntaxError
from resihp.ir.expand import expand
from resihp.ir.facts import Facts, StageFacts
from resihp.ir.lanes import lanes_of
from resihp.ir.lint import lint
from resihp.ir.model import Op
from resihp.ir.parser import parse
from resihp.ir.program import TensorType
from resihp.ir.program_text import parse_programs, print_program
from resihp.ir.timeline import play
from resihp.ir.transport import parse_transport
from resihp.ir.verify import verify

FOLDER = Path(__file__).parent

# --- two stages


TWO = (
    "F 0; send_act 0; F 1; send_act 1; recv_grad 0; BW 0; recv_grad 1; BW 1" + END,
    "recv_act 0; F 0; BW 0; send_grad 0; recv_act 1; F 1; BW 1; send_grad 1" + END,
)
"""1F1B of two micro-batches."""
SPLIT = (
    "F 0; send_act 0; F 1; send_act 1; recv_grad 0; B 0; W 0; recv_grad 1; B 1; W 1" + END,
    "recv_act 0; F 0; B 0; send_grad 0; recv_act 1; F 1; B 1; send_grad 1; W 0; W 1" + END,
)
"""The same with B and W apart."""
PAIR = plan_text(*TWO)


def test_the_usual_plan_is_accepted():
    """What the mended plans of this file are made of."""
    assert found(PAIR) == found(plan_text(*SPLIT)) == []


# --- two ranks, four stages


LOOPED = ("0..1,4..5", "2..3,6..7")
EVENS, ODDS = (f"; reduce_grads[{stage}]; reduce_grads[{stage + 2}]; step" for stage in (0, 1))
FORWARDS_FIRST = (
    "F[0] 0; send_act[0] 0; F[0] 1; send_act[0] 1; recv_act[2] 0; F[2] 0; send_act[2] 0;"
    "recv_act[2] 1; F[2] 1; send_act[2] 1; recv_grad[2] 0; BW[2] 0; send_grad[2] 0;"
    "recv_grad[2] 1; BW[2] 1; send_grad[2] 1; recv_grad[0] 0; BW[0] 0; recv_grad[0] 1; BW[0] 1"
    + EVENS,
    "recv_act[1] 0; F[1] 0; recv_act[1] 1; send_act[1] 0; recv_act[3] 0; F[1] 1; send_act[1] 1;"
    "F[3] 0; recv_act[3] 1; F[3] 1; BW[3] 0; send_grad[3] 0; recv_grad[1] 0; BW[3] 1;"
    "send_grad[3] 1; recv_grad[1] 1; BW[1] 0; send_grad[1] 0; BW[1] 1; send_grad[1] 1" + ODDS,
)
"""All forwards, then all backwards."""
IN_TURN = (
    "F[0] 0; send_act[0] 0; recv_act[2] 0; F[2] 0; send_act[2] 0; F[0] 1; send_act[0] 1;"
    "recv_grad[2] 0; BW[2] 0; send_grad[2] 0; recv_act[2] 1; F[2] 1; send_act[2] 1;"
    "recv_grad[0] 0; BW[0] 0; recv_grad[2] 1; BW[2] 1; send_grad[2] 1; recv_grad[0] 1; BW[0] 1"
    + EVENS,
    "recv_act[1] 0; F[1] 0; send_act[1] 0; recv_act[3] 0; F[3] 0; BW[3] 0; send_grad[3] 0;"
    "recv_act[1] 1; F[1] 1; send_act[1] 1; recv_grad[1] 0; BW[1] 0; send_grad[1] 0;"
    "recv_act[3] 1; F[3] 1; BW[3] 1; send_grad[3] 1; recv_grad[1] 1; BW[1] 1; send_grad[1] 1"
    + ODDS,
)
"""Activations and gradients of both stages alternate on each of the two channels."""


def looped(streams: tuple[str, str]) -> str:
    return plan_text(*streams, layers=LOOPED)


def test_the_usual_loops_are_accepted():
    """Four stages on two ranks, in either order."""
    assert found(looped(FORWARDS_FIRST)) == found(looped(IN_TURN)) == []


# --- order of transfers, deadlock


@pytest.mark.parametrize("transport", ["pair", "eager=0"])
def test_a_rank_that_sends_to_the_next_stage_before_it_receives_blocks_both(transport):
    """Report 1: the ranks sit in `send_act[0] 1` and `send_act[1] 0`, and nobody receives.

    Posted before that send, the receive lets both go on.
    """
    good = looped(FORWARDS_FIRST)
    bad = edit(
        good,
        (
            "recv_act[1] 1; send_act[1] 0; recv_act[3] 0; F[1] 1",
            "send_act[1] 0; recv_act[1] 1; recv_act[3] 0; F[1] 1",
        ),
    )
    assert found(bad) == []
    (finding,) = found(bad, transport=transport)
    assert finding[0] == "RHP501"
    assert found(good, transport=transport) == []


DEFERRED = edit(
    looped(FORWARDS_FIRST),
    (
        "recv_act[3] 0; F[1] 1; send_act[1] 1; F[3] 0; recv_act[3] 1; F[3] 1",
        "F[1] 1; send_act[1] 1; recv_act[3] 1; F[3] 1; recv_act[3] 0; F[3] 0",
    ),
)
"""Each receive right before its use; stage 3 takes the micro-batches in another order."""


def test_receives_deferred_to_their_use_leave_the_order_of_the_sends():
    """Report 2: it does not hang, it trains on swapped tensors."""
    assert found(DEFERRED) == [("RHP412", "dp0.pp1: recv_act[3] 1")]


@pytest.mark.parametrize("costs", [(1, 1), (100, 1), (1, 100)])
def test_a_swap_is_found_whatever_the_timing(costs):
    """Report 9: the race shows only when some ranks sleep; the plan shows it always."""
    forward, backward = costs
    lanes = lanes_of(parse(DEFERRED).plan)
    assert not play(lanes, {Op.F: forward, Op.BW: backward}).stuck
    assert [code for code, _ in found(DEFERRED)] == ["RHP412"]


def test_a_receive_before_sends_that_could_go_makes_a_bubble():
    """Report 3: with one queue per rank stage 2 starts later, though its input is there."""
    backwards = "; ".join(f"recv_grad {n}; BW {n}; send_grad {n}" for n in range(3)) + END
    streams = (
        "F 0; send_act 0; F 1; send_act 1; F 2; send_act 2;"
        + re.sub(r"send_grad .;?", "", backwards),
        "recv_act 0; F 0; send_act 0; recv_act 1; F 1; send_act 1; recv_act 2; F 2; send_act 2;"
        + backwards,
        "recv_act 0; F 0; recv_act 1; F 1; recv_act 2; F 2;"
        + re.sub(r"recv_grad .;", "", backwards),
    )
    good = plan_text(*streams, layers=("0..1", "2..3", "4..7"), microbatches=3)
    bad = edit(
        good,
        (
            "recv_act 0; F 0; send_act 0; recv_act 1; F 1; send_act 1; recv_act 2; F 2; send_act 2",
            "recv_act 0; recv_act 1; recv_act 2; F 0; send_act 0; F 1; send_act 1; F 2; send_act 2",
        ),
    )
    assert found(good, transport="rank") == found(bad, transport="rank") == []
    slow = {Op.F: 3.0, Op.BW: 1.0}
    starts = [
        play(lanes, slow, parse_transport("rank")).starts
        for lanes in (lanes_of(parse(text).plan) for text in (good, bad))
    ]
    last = max(starts[0])
    assert (starts[0][last][1], starts[1][last][1]) == (6, 9)


RING = tuple(
    "; ".join(
        [
            *(
                f"{recv}F[{stage}] {number}{send}"
                for stage in (pos, pos + 4)
                for recv, number, send in (
                    (
                        "" if stage == 0 else f"recv_act[{stage}] {number}; ",
                        number,
                        "" if stage == 7 else f"; send_act[{stage}] {number}",
                    )
                    for number in (0, 1)
                )
            ),
            *(
                f"{recv}BW[{stage}] {number}{send}"
                for stage in (pos + 4, pos)
                for recv, number, send in (
                    (
                        "" if stage == 7 else f"recv_grad[{stage}] {number}; ",
                        number,
                        "" if stage == 0 else f"; send_grad[{stage}] {number}",
                    )
                    for number in (0, 1)
                )
            ),
            f"reduce_grads[{pos}]; reduce_grads[{pos + 4}]; step",
        ]
    )
    for pos in range(4)
)
"""Four ranks, eight stages, two micro-batches: stage by stage, receives right before use."""


def test_a_ring_with_one_queue_per_rank():
    """Report 5: rank 0's sends to rank 1 and its receive from rank 3 block each other.

    Queues per pair of ranks are enough here, and so are directed ones.
    """
    good = plan_text(*RING, layers=[f"{pos}..{pos},{pos + 4}..{pos + 4}" for pos in range(4)])
    bad = edit(
        good,
        (
            "F[0] 0; send_act[0] 0; F[0] 1; send_act[0] 1; recv_act[4] 0",
            "F[0] 0; send_act[0] 0; recv_act[4] 0; F[0] 1; send_act[0] 1",
        ),
        (
            "recv_act[1] 0; F[1] 0; send_act[1] 0; recv_act[1] 1",
            "recv_act[1] 0; F[1] 0; recv_act[1] 1; send_act[1] 0",
        ),
    )
    assert found(bad) == found(bad, transport="pair") == []
    (finding,) = found(bad, transport="rank")
    assert finding[0] == "RHP501"
    assert found(good, transport="rank") == []


@pytest.mark.parametrize(
    ("right", "wrong", "place"),
    [
        (
            "recv_act[1] 1; F[1] 1; send_act[1] 1; recv_grad[1] 0",
            "recv_grad[1] 0; recv_act[1] 1; F[1] 1; send_act[1] 1",
            "dp0.pp1: recv_grad[1] 0",
        ),
        (
            "recv_act[3] 0; F[3] 0; BW[3] 0; send_grad[3] 0; recv_act[1] 1; F[1] 1; send_act[1] 1",
            "recv_act[1] 1; recv_act[3] 0; F[3] 0; BW[3] 0; send_grad[3] 0; F[1] 1; send_act[1] 1",
            "dp0.pp1: recv_act[1] 1",
        ),
    ],
)
def test_with_two_ranks_previous_and_next_are_the_same(right, wrong, place):
    """Reports 21 and 22: an activation is taken for a gradient, or for that of another stage."""
    good = looped(IN_TURN)
    assert found(edit(good, (right, wrong))) == [("RHP412", place)]


def test_a_tensor_has_one_way():
    """Report 8: a skip connection would be a second send of the same activation."""
    good = plan_text(*TWO)
    bad = edit(good, ("F 0; send_act 0", "F 0; send_act 0; send_act 0"))
    assert found(bad) == [("RHP403", "dp0.pp0: send_act 0")]


def test_stages_of_one_rank_hand_over_in_place():
    """V placement: at the bottom both neighbours are on one rank; a transfer to oneself hangs."""
    good = plan_text(
        "F[0] 0; send_act[0] 0; recv_act[3] 0; F[3] 0; BW[3] 0; send_grad[3] 0; recv_grad[0] 0;"
        "BW[0] 0; reduce_grads[0]; reduce_grads[3]; step",
        "recv_act[1] 0; F[1] 0; F[2] 0; send_act[2] 0; recv_grad[2] 0; BW[2] 0; BW[1] 0;"
        "send_grad[1] 0; reduce_grads[1]; reduce_grads[2]; step",
        layers=("0..1,6..7", "2..3,4..5"),
        microbatches=1,
    )
    assert found(good) == []
    bad = edit(good, ("F[1] 0; F[2] 0", "F[1] 0; send_act[1] 0; recv_act[2] 0; F[2] 0"))
    assert found(bad) == [("RHP415", "dp0.pp1: send_act[1] 0")]
    swapped = edit(good, ("F[1] 0; F[2] 0", "F[2] 0; F[1] 0"))
    assert found(swapped) == [("RHP416", "dp0.pp1: F[2] 0")]


def test_a_gradient_asked_for_before_its_activation_is_sent():
    """A hand-made schedule that torch's validator takes, and that hangs until a timeout."""
    bad = edit(
        PAIR,
        ("F 0; send_act 0; F 1; send_act 1; recv_grad 0; BW 0",
         "F 0; recv_grad 0; BW 0; send_act 0; F 1; send_act 1"),
    )  # fmt: skip
    assert found(bad) == [("RHP501", "dp0.pp0: BW 0")]


def test_the_finding_names_the_stage_and_the_line():
    """Reports 67 and 68: which of a rank's stages it is, and what stands where at both ends."""
    (finding,) = verify(parse(DEFERRED))
    assert "`recv_act[3] 1`" in finding.message
    lines = DEFERRED.split("\n")
    assert lines[finding.span.line - 1] == "  recv_act[3] 1"
    assert [lines[note.span.line - 1] for note in finding.related] == [
        "  send_act[2] 0",
        "  send_act[2] 1",
        "  recv_act[3] 0",
    ]


# --- who is where


def test_a_stage_without_layers():
    """Report 24: the last position has a stream and holds nothing."""
    good = plan_text(*TWO, "", layers=("0..3", "4..7", ""), lines=("standby 2",))
    assert found(good) == []
    bad = good + "stream dp=0 pp=2 {\n  step\n}\n"
    assert found(bad) == [("RHP207", "stream dp=0 pp=2 {")]


@pytest.mark.parametrize(
    ("layers", "place"),
    [
        (("0..3", "3..6"), "group dp0.pp1 ranks=1 layers=3..6"),
        (("0..2", "4..6"), "group dp0.pp1 ranks=1 layers=4..6"),
        (("0..3", "4..5"), "group dp0.pp1 ranks=1 layers=4..5"),
    ],
)
def test_layers_of_an_uneven_cut_are_each_there_once(layers, place):
    """Report 25: an odd number of layers, cut twice, not at all, or right."""
    assert found(plan_text(*TWO, layers=("0..3", "4..6"), num_layers=7)) == []
    assert found(plan_text(*TWO, layers=layers, num_layers=7)) == [("RHP205", place)]


def test_a_v_schedule_on_ranks_that_are_placed_in_a_loop():
    """Report 62: stage 3 would be on rank 0, and is on rank 1."""
    assert ("RHP109", "dp0.pp0: F[3] 0") in found(
        edit(looped(IN_TURN), ("recv_act[2] 0; F[2] 0", "recv_act[2] 0; F[3] 0"))
    )


def test_fewer_stages_than_the_schedule_is_for():
    """Report 64: two of four stages are given; the rest of the model is in none."""
    streams = (*TWO, "", "")
    lines = ("standby 2,3",)
    whole = plan_text(*streams, layers=("0..3", "4..7", "", ""), lines=lines)
    assert found(whole) == []
    half = whole.replace("0..3", "0..1").replace("4..7", "2..3")
    assert found(half) == [("RHP205", "group dp0.pp1 ranks=1 layers=2..3")]


def test_a_warm_up_for_more_micro_batches_than_there_are():
    """Report 63: 1F1B of three stages warms up with two forwards, and there is one micro-batch."""
    good = plan_text(
        "F 0; send_act 0; recv_grad 0; BW 0" + END,
        "recv_act 0; F 0; send_act 0; recv_grad 0; BW 0; send_grad 0" + END,
        "recv_act 0; F 0; BW 0; send_grad 0" + END,
        layers=("0..1", "2..4", "5..7"),
        microbatches=1,
    )
    assert found(good) == []
    bad = good.replace(
        "  F 0\n  send_act 0\n  recv_grad 0\n", "  F 0\n  F 1\n  send_act 0\n  recv_grad 0\n", 1
    )
    assert found(bad) == [("RHP104", "dp0.pp0: F 1")]


def test_a_stage_that_skips_its_first_micro_batch():
    """torch's own text of 1F1B: the last rank runs 1 .. m instead of 0 .. m - 1."""
    last = TWO[1].replace(" 1", " 2").replace(" 0", " 1")
    codes = {code for code, place in found(plan_text(TWO[0], last)) if "F 2" in place}
    assert codes == {"RHP104"}


# --- shapes and numbers of messages


def test_a_micro_batch_that_cannot_be_cut_evenly():
    """Report 32: the last share is smaller, and the receiver expects equal ones."""
    wide = (
        "F 0; scatter_act 0; send_act 0; recv_grad 0; gather_grad 0; BW 0" + END,
        "recv_act 0; gather_act 0; F 0; BW 0; scatter_grad 0; send_grad 0" + END,
    )
    options = {"ranks": ("0,1", "2"), "tp": 2, "microbatches": 1, "lines": ("lost 3",)}
    good, bad = (plan_text(*wide, tokens=tokens, **options) for tokens in (16, 15))
    assert found(good) == []
    assert {code for code, _ in found(bad)} == {"RHP411"}
    assert found(bad)[0][1] == "dp0.pp0: scatter_act 0"


def test_one_end_sends_fewer_messages_than_the_other_waits_for():
    """Report 34: one message where the receiver waits for each of two chunks."""
    wide = (
        "F 0; scatter_act 0; send_act 0; recv_grad 0; BW 0" + END,
        "recv_act 0; gather_act 0; F 0; BW 0; send_grad 0" + END,
    )
    good = plan_text(*wide, ranks=("0,1", "2,3"), tp=2, microbatches=1)
    assert found(good) == []
    bad = edit(good, ("F 0; scatter_act 0; send_act 0", "F 0; send_act 0"))
    assert [code for code, _ in found(bad)] == ["RHP409"]


def test_a_stage_that_owes_a_gradient():
    """Report 37: the stage before waits for a gradient that nobody sends."""
    bad = edit(PAIR, ("BW 0; send_grad 0", "BW 0"))
    assert found(bad) == [("RHP401", "dp0.pp0: recv_grad 0")]


def test_a_message_of_another_element_type():
    """Reports 35 and 36: what crosses stages is float32 or bfloat16, and nothing else."""
    good = print_program(expand(parse(PAIR).plan, rank=1))
    assert parse_programs(good)[0].program.instrs[0].tensor == TensorType(16, 64, "f32")
    bad = good.replace("recv_act 0@0 <- 0 16x64xf32", "recv_act 0@0 <- 0 16x64xf16")
    with pytest.raises(PlanSyntaxError) as refused:
        parse_programs(bad)
    (finding,) = refused.value.diagnostics
    assert finding.code == "RHP001"
    assert bad.split("\n")[finding.span.line - 1] == "  recv_act 0@0 <- 0 16x64xf16"


# --- memory


def sizes_of(text: str, only: int | None = None, **changes: int) -> Facts:
    """Activations of 100, buffers of 10, no state; with `only`, nothing at other positions."""
    sizes = {
        "state_bytes": 0,
        "activation_bytes": 100,
        "released_by_b_bytes": 60,
        "weight_input_grad_bytes": 20,
        "boundary_bytes": 10,
    }
    stage, none = StageFacts(**(sizes | changes)), StageFacts(**dict.fromkeys(sizes, 0))
    return Facts(
        stages={
            group.name: (stage if only in (None, group.pp) else none,) * len(group.layers)
            for group in parse(text).plan.groups
        }
    )


def with_memory(text: str, num_bytes: int) -> str:
    return text.replace("\ngroup", f"\nmemory {num_bytes}\ngroup", 1)


def needed(text: str, facts: Facts) -> int:
    """The least memory that the plan is accepted with, in tens."""
    return next(n for n in range(0, 5000, 10) if not found(with_memory(text, n), facts=facts))


def steady(num_ahead: int, microbatches: int = 8) -> str:
    """1F1B of two stages; the last posts each receive some micro-batches ahead."""
    numbers = range(microbatches)
    first = [f"F {n}; send_act {n}" for n in numbers]
    backwards = [f"recv_grad {n}; BW {n}" for n in numbers]
    for n in range(2, microbatches):
        backwards[n - 2] += f"; {first[n]}"
    last = [f"recv_act {n}" for n in numbers[:num_ahead]]
    for n in numbers:
        last += [f"recv_act {n + num_ahead}"] if n + num_ahead < microbatches else []
        last += [f"F {n}; BW {n}; send_grad {n}"]
    streams = "; ".join([*first[:2], *backwards]) + END, "; ".join(last) + END
    return plan_text(*streams, microbatches=microbatches)


def test_one_receive_buffer_too_many():
    """Report 40: a receive is posted a micro-batch ahead, and the device has no room for it."""
    good, bad = steady(0), steady(1)
    last_stage = sizes_of(good, only=1)
    enough = needed(good, last_stage)
    assert needed(bad, last_stage) == enough + 10
    assert found(with_memory(bad, enough), facts=last_stage) == [("RHP601", "dp0.pp1: BW 1")]


def test_receive_buffers_for_every_micro_batch_up_front():
    """Report 54: eight receives at the start are eight buffers; lint says that they are early."""
    good, bad = steady(0), steady(8)
    last_stage = sizes_of(good, only=1)
    enough = needed(good, last_stage)
    assert needed(bad, last_stage) >= enough + 50
    assert found(with_memory(bad, enough), facts=last_stage) == [("RHP601", "dp0.pp1: BW 0")]
    assert [(w.code, w.span.line) for w in lint(parse(bad))] == [
        ("RHP903", bad.split("\n").index("  recv_act 7") + 1)
    ]
    assert lint(parse(good)) == []


def test_weight_gradients_put_off_to_the_end():
    """Reports 52 and 53: the same work keeps more alive, up to every micro-batch of the step."""
    good = plan_text(*SPLIT)
    bad = edit(
        good,
        ("B 0; W 0; recv_grad 1; B 1; W 1", "B 0; recv_grad 1; B 1; W 0; W 1"),
    )
    first_stage = sizes_of(good, only=0, weight_input_grad_bytes=90)
    enough = needed(good, first_stage)
    assert needed(bad, first_stage) > enough
    assert found(with_memory(bad, enough), facts=first_stage) == [("RHP601", "dp0.pp0: B 1")]


def test_each_stage_has_its_own_peak():
    """Report 55: the first stage holds two micro-batches, the last one."""
    facts = sizes_of(PAIR)
    enough = needed(PAIR, facts)
    assert enough > needed(PAIR, sizes_of(PAIR, only=1))
    findings = found(with_memory(PAIR, enough - 10), facts=facts)
    assert [(code, place.split(":")[0]) for code, place in findings] == [("RHP601", "dp0.pp0")]


def test_a_backward_that_needs_more_than_it_frees():
    """Report 57: where the gradients that W needs outweigh what B gives back, the peak is at B."""
    alone = plan_text("F 0; B 0; W 0; F 1; B 1; W 1" + END)
    facts = sizes_of(alone, weight_input_grad_bytes=90)
    assert found(with_memory(alone, 120), facts=sizes_of(alone)) == []
    assert found(with_memory(alone, 120), facts=facts) == [("RHP601", "dp0.pp0: B 0")]
    assert found(with_memory(alone, 200), facts=facts) == []


def state_bytes(text: str) -> list[int]:
    """Parameters, moments and gradients of each group, by the compiler's account."""
    plan = parse(text).plan
    stages = [facts_of(plan).stages[group.name] for group in plan.groups]
    return [sum(sizes.state_bytes for sizes in held) for held in stages]


CHAIN = (
    "F 0; send_act 0; recv_grad 0; BW 0" + END,
    "recv_act 0; F 0; send_act 0; recv_grad 0; BW 0; send_grad 0" + END,
    "recv_act 0; F 0; send_act 0; recv_grad 0; BW 0; send_grad 0" + END,
    "recv_act 0; F 0; BW 0; send_grad 0" + END,
)


def test_memory_of_an_uneven_cut_is_not_that_of_an_even_one():
    """Report 58: 1, 2, 2, 3 layers; an account that divides evenly is far too low for the last."""
    even = plan_text(*CHAIN, microbatches=1)
    uneven = plan_text(*CHAIN, microbatches=1, layers=("0..0", "1..2", "3..4", "5..7"))
    capacity = max(state_bytes(even)) + (1 << 19)
    assert found(with_memory(even, capacity)) == []
    assert max(state_bytes(uneven)) > capacity
    (finding,) = found(with_memory(uneven, capacity))
    assert finding == ("RHP602", "group dp0.pp3 ranks=3 layers=5..7")


def test_embedding_and_head_on_one_rank():
    """Report 56: V placement puts both on the first rank, a loop does not."""
    vee = plan_text(
        "F[0] 0; send_act[0] 0; recv_act[3] 0; F[3] 0; BW[3] 0; send_grad[3] 0; recv_grad[0] 0;"
        "BW[0] 0; reduce_grads[0]; reduce_grads[3]; step",
        "recv_act[1] 0; F[1] 0; F[2] 0; send_act[2] 0; recv_grad[2] 0; BW[2] 0; BW[1] 0;"
        "send_grad[1] 0; reduce_grads[1]; reduce_grads[2]; step",
        layers=("0..1,6..7", "2..3,4..5"),
        microbatches=1,
    ).replace("vocab=128", "vocab=4096")
    loop = looped(IN_TURN).replace("vocab=128", "vocab=4096")
    capacity = max(state_bytes(loop)) + (2 << 20)
    assert found(with_memory(loop, capacity)) == []
    assert found(with_memory(vee, capacity)) == [
        ("RHP602", "group dp0.pp0 ranks=0 layers=0..1,6..7")
    ]


# --- gradients


def test_a_loss_belongs_to_its_micro_batch():
    """Report 41: the last stage may take them in any order, if each backward has its forward."""
    other_way_round = plan_text(
        "F 1; send_act 1; F 0; send_act 0; recv_grad 0; BW 0; recv_grad 1; BW 1" + END,
        "recv_act 1; F 1; recv_act 0; F 0; BW 0; send_grad 0; BW 1; send_grad 1" + END,
    )
    assert found(other_way_round) == []
    bad = edit(PAIR, ("F 0; BW 0; send_grad 0; recv_act 1; F 1; BW 1; send_grad 1",
                      "F 0; BW 1; send_grad 1; recv_act 1; F 1; BW 0; send_grad 0"))  # fmt: skip
    assert ("RHP305", "dp0.pp1: BW 1") in found(bad)


def test_a_gradient_that_is_averaged_twice():
    """Reports 42 and 45: where the reduction also divides, a second one divides again."""
    bad = PAIR.replace("  reduce_grads\n", "  reduce_grads\n  reduce_grads\n")
    assert found(bad) == [("RHP703", f"dp0.pp{pos}: reduce_grads") for pos in (0, 1)]


def test_the_last_backward_counts_b_and_w():
    """Report 50: after the last B there is still a W, and the reduction must wait for it."""
    good = plan_text(*SPLIT)
    bad = edit(good, ("W 0; W 1; reduce_grads", "W 0; reduce_grads; W 1"))
    assert [code for code, _ in found(bad)] == ["RHP704"]


def test_gradients_that_are_never_reduced():
    """A comms file without REDUCE_GRAD is accepted elsewhere, and trains on unscaled gradients."""
    bad = PAIR.replace("  reduce_grads\n", "", 1)
    assert found(bad) == [("RHP701", "stream dp=0 pp=0 {")]


def test_a_weight_gradient_before_its_b_and_without():
    """Report 51: W finds an empty queue."""
    good = plan_text(*SPLIT)
    assert found(edit(good, ("recv_grad 0; B 0; W 0", "recv_grad 0; W 0; B 0"))) == [
        ("RHP305", "dp0.pp0: W 0")
    ]
    missing = found(edit(good, ("recv_grad 0; B 0; W 0", "recv_grad 0; W 0")))
    assert ("RHP303", "dp0.pp0: F 0") in missing


def test_b_is_half_of_the_backward():
    """Report 66: a B meant as the whole backward leaves the weight gradient out."""
    bad = edit(PAIR, ("recv_grad 0; BW 0", "recv_grad 0; B 0"))
    assert found(bad) == [("RHP303", "dp0.pp0: F 0")]


def test_work_that_is_done_twice():
    """A repeated forward runs without complaint elsewhere; so does a backward for another's."""
    assert found(edit(PAIR, ("F 0; send_act 0; F 1", "F 0; F 0; send_act 0; F 1"))) == [
        ("RHP302", "dp0.pp0: F 0")
    ]
    twice = edit(PAIR, ("recv_grad 1; BW 1", "recv_grad 1; BW 0"))
    assert {code for code, _ in found(twice)} >= {"RHP302", "RHP303"}


def test_a_rendezvous_that_only_some_enter():
    """Report 69: whether to enter was computed in three places, and one of them differed."""
    bad = edit(PAIR, ("BW 1; send_grad 1; reduce_grads; step", "BW 1; send_grad 1; reduce_grads"))
    assert found(bad) == [("RHP702", "stream dp=0 pp=1 {")]


# --- parameters that are gathered, pairs


SHARDED = plan_text(
    "gather_params[0]; F[0] 0; free_params[0]; gather_params[1]; F[1] 0; BW[1] 0; free_params[1];"
    "gather_params[0]; BW[0] 0; free_params[0]; reduce_grads[0]; reduce_grads[1]; step",
    layers=("0..3,4..7",),
    microbatches=1,
)
"""One rank, two stages; only one stage's parameters are there at a time."""


@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [
        (
            "gather_params[1]; F[1] 0",
            "F[1] 0; gather_params[1]",
            ("RHP417", "dp0.pp0: F[1] 0"),
        ),
        (
            "gather_params[0]; BW[0] 0; free_params[0]",
            "BW[0] 0",
            ("RHP417", "dp0.pp0: BW[0] 0"),
        ),
        (
            "F[0] 0; free_params[0]; gather_params[1]",
            "F[0] 0; gather_params[1]",
            ("RHP418", "dp0.pp0: gather_params[0]"),
        ),
    ],
)
def test_compute_without_its_parameters(right, wrong, expected):
    """Reports 59 and 60: gathered too late, not again, or a second time without being freed."""
    assert found(SHARDED) == []
    assert found(edit(SHARDED, (right, wrong))) == [expected]


def test_overlap_in_plain_1f1b():
    """Report 70: a forward and a backward of different micro-batches may overlap; of one, not."""
    good = plan_text("F 0; F 1 & BW 0; BW 1" + END)
    assert found(good) == []
    bad = plan_text("F 0; F 1 & BW 1; BW 0" + END)
    assert found(bad) == [("RHP110", "dp0.pp0: F 1 & BW 1")]


# --- the table


def table() -> dict[int, str]:
    """Number of a report -> what the table says about its test."""
    text = (FOLDER / "public_reports.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| .* \| .* \| (.*) \|$", text, flags=re.MULTILINE)
    return {int(number): where for number, where in rows}


def test_every_report_of_the_survey_is_in_the_table():
    """72 of them, each with a test or with the reason why it has none."""
    assert list(table()) == list(range(1, 73))
    covered = [number for number, where in table().items() if "test_" in where]
    assert len(covered) >= 45


def test_the_tests_of_the_table_exist():
    """By name, in the module that is named or in this one."""
    named = re.findall(r"`(?:(\w+\.py)::)?(test_\w+)`", "\n".join(table().values()))
    sources = {
        module: (FOLDER / (module or Path(__file__).name)).read_text(encoding="utf-8")
        for module, _ in named
    }
    missing = [name for module, name in named if f"def {name}(" not in sources[module]]
    assert missing == []


def test_every_report_of_this_file_is_in_the_table():
    """A test that names a report is named there."""
    source = Path(__file__).read_text(encoding="utf-8")
    for name, text in re.findall(r"def (test_\w+)\(.*\n    \"\"\"(Reports?[^:]*):", source):
        numbers = [int(number) for number in re.findall(r"\d+", text)]
        assert all(f"`{name}`" in table()[number] for number in numbers), name
