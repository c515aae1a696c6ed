"""Progress under each transport: against the oracle, by hand, and as public reports tell it.

`public_reports.md` says which report has its symptom in which test here.
"""

from __future__ import annotations

import itertools
import random
import re

import pytest
import transport_oracle
from plan_build import make_plan
from random_plans import random_plan

from resihp.errors import UserError
from resihp.ir.diagnostics import Diagnostic
from resihp.ir.facts import Facts, StageFacts
from resihp.ir.lanes import lanes_of
from resihp.ir.model import Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.show import draw
from resihp.ir.timeline import play
from resihp.ir.transport import Transport, parse_transport
from resihp.ir.verify import verify

MESSAGE_BYTES = 4096
"""An activation of the plans here: 16 tokens of 64 float32."""
TRANSPORTS = ("edge", "pair", "rank", "eager=0", "eager=2048", "eager=4096", "eager=8192")
WORDS = {
    "F": "F", "X": "BW", "B": "B", "W": "W", "sa": "send_act", "ra": "recv_act",
    "sg": "send_grad", "rg": "recv_grad", "reduce": "reduce_grads", "step": "step",
}  # fmt: skip


def plan_text(*streams: str, dp: int = 1, microbatches: int = 2, tokens: int = 16) -> str:
    """A plan of one rank per group; streams in short, stage by stage, replica after replica."""
    pp = len(streams) // dp
    lines = [
        "plan 1",
        "model tiny layers=8 hidden=64 heads=8 kv_heads=4 ffn=96 vocab=128",
        f"mesh tp=1 pp={pp} dp={dp}",
        f"batch microbatches={microbatches} tokens={tokens}",
    ]
    for rank in range(len(streams)):
        stage = rank % pp
        layers = f"{stage}..{stage if stage < pp - 1 else 7}"
        lines.append(f"group dp{rank // pp}.pp{stage} ranks={rank} layers={layers}")
    for rank, stream in enumerate(streams):
        lines.append(f"stream dp={rank // pp} pp={rank % pp} {{")
        for word in stream.split():
            name, number = re.fullmatch(r"([A-Za-z]+)(\d*)", word).groups()  # pyright: ignore[reportOptionalMemberAccess]
            lines.append(f"  {WORDS[name]} {number}".rstrip())
        lines.append("}")
    return "\n".join(lines) + "\n"


def codes(text: str, transport: str = "edge") -> list[str]:
    return sorted({finding.code for finding in verify(parse(text), transport=transport)})


def deadlocks(text: str, transport: str = "edge") -> list[Diagnostic]:
    found = verify(parse(text), transport=transport)
    return [finding for finding in found if finding.code == "RHP501"]


def accepts(plan: Plan, transport: str) -> bool:
    lanes = lanes_of(plan)
    sizes = dict.fromkeys(lanes, MESSAGE_BYTES)
    return not play(lanes, transport=parse_transport(transport), boundary_bytes=sizes).stuck


# --- against the oracle


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_player_agrees_with_the_oracle(transport):
    """A thousand random plans: it finishes exactly if every rank of the simulation does."""
    rng = random.Random(transport)
    verdicts: list[bool] = []
    for _ in range(1000):
        plan = random_plan(rng)
        verdicts.append(accepts(plan, transport))
        finishes = transport_oracle.finishes(plan, transport, MESSAGE_BYTES)
        assert verdicts[-1] == finishes, print_plan(plan)
    assert 200 < sum(verdicts) < 900


def test_the_verifier_reports_exactly_what_the_player_finds():
    """RHP501 and nothing else where a random plan is stuck; each report is a closed circle."""
    rng = random.Random(5)
    for _ in range(150):
        plan, transport = random_plan(rng), rng.choice(TRANSPORTS)
        text = print_plan(plan)
        found = verify(parse(text), transport=transport)
        expected = set() if accepts(plan, transport) else {"RHP501"}
        assert {finding.code for finding in found} == expected, text
        for finding in found:
            assert len(finding.related) >= 2
            follows = [note.span.line for note in finding.related]
            after = [int(re.findall(r"line (\d+)", note.message)[-1]) for note in finding.related]
            assert after == [*follows[1:], follows[0]], finding


def test_a_swap_that_is_proposed_mends_the_plan():
    """Doing what the hint says leaves fewer deadlocks and nothing else."""
    rng, num_swaps = random.Random(6), 0
    for _ in range(150):
        text, transport = print_plan(random_plan(rng)), rng.choice(TRANSPORTS)
        found = verify(parse(text), transport=transport)
        for finding in found:
            swap = re.match(r"swap `.*` \(line (\d+)\) and `.*` \(line (\d+)\)", finding.hint or "")
            if swap:
                lines = text.split("\n")
                first, second = (int(line) - 1 for line in swap.groups())
                lines[first], lines[second] = lines[second], lines[first]
                after = verify(parse("\n".join(lines)), transport=transport)
                assert {f.code for f in after} <= {"RHP501"}
                assert len(after) < len(found)
                num_swaps += 1
    assert num_swaps > 10


def test_a_stricter_transport_refuses_more():
    """rank, pair, edge; eager with growing buffers, edge. Here rank and pair even agree."""
    rng = random.Random(7)
    growing = ["eager=0", "eager=2048", "eager=4096", "eager=8192", "eager=1GiB"]
    for _ in range(500):
        plan = random_plan(rng)
        verdict = {name: accepts(plan, name) for name in (*TRANSPORTS, "eager=1GiB")}
        for strict, loose in [*itertools.pairwise(growing), ("pair", "edge"), ("rank", "eager=0")]:
            assert verdict[loose] or not verdict[strict], (strict, loose, print_plan(plan))
        assert verdict["eager=1GiB"] == verdict["edge"]
        # Neighbours form a line, and here nothing is sent after reduce_grads.
        assert verdict["rank"] == verdict["pair"]


def test_the_length_of_the_picture_is_that_of_an_independent_simulation():
    """Times relaxed until nothing changes give the makespan of `play` and `show`."""
    rng, num_played = random.Random(8), 0
    for _ in range(300):
        plan = random_plan(rng)
        if accepts(plan, "edge"):
            expected = transport_oracle.makespan(plan)
            assert play(lanes_of(plan)).makespan == expected
            assert f"; {expected:g} units of time\n" in draw(plan)
            num_played += 1
    assert num_played > 100


# --- by hand


EARLY = plan_text(
    "F0 sa0 rg0 F1 sa1 X0 rg1 X1 reduce step",
    "ra0 ra1 F0 F1 X0 sg0 X1 sg1 reduce step",
)
"""Stage 0 lists gradient 0 long before stage 1, which wants activation 1 first, can send it."""
CRISS_CROSS = plan_text(
    "F0 sa0 F1 rg0 sa1 X0 rg1 X1 reduce step",
    "ra0 F0 X0 ra1 sg0 F1 X1 sg1 reduce step",
)
"""Both have activation 1 and gradient 0 to exchange, receives first."""


@pytest.mark.parametrize(
    ("pp", "dp", "microbatches", "order"),
    [
        (pp, dp, microbatches, order)
        for pp, dp, microbatches in itertools.product((1, 2, 4), (1, 2), (1, 2, 3, 4, 5, 8))
        for order in ("1f1b", "gpipe")
    ],
)
def test_usual_schedules_pass_edge_at_every_size(pp, dp, microbatches, order):
    """One micro-batch, fewer than stages, as many, more."""
    text = print_plan(make_plan(pp=pp, dp=dp, microbatches=microbatches, order=order))
    assert codes(text) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gpipe_passes_everywhere(transport):
    """All forwards, then all backwards in the same order: nobody waits in a circle."""
    assert codes(print_plan(make_plan(pp=4, microbatches=6, order="gpipe")), transport) == []


def test_many_micro_batches_pass():
    """Hundreds of transfers between two ranks."""
    assert codes(print_plan(make_plan(pp=2, microbatches=400))) == []


@pytest.mark.parametrize("transport", ["pair", "rank"])
def test_1f1b_passes_edge_and_deadlocks_per_pair_or_rank(transport):
    """Stage 0 lists activation 1 before gradient 0, stage 1 the other way round."""
    text = print_plan(make_plan(pp=2, microbatches=4))
    assert codes(text) == []
    assert codes(text, transport) == ["RHP501"]


@pytest.mark.parametrize("transport", ["edge", "pair", "rank", "eager=0"])
def test_1f1b_that_lists_receives_in_the_order_of_the_sends_passes(transport):
    """The last stage posts activation m + 1 before it sends gradient m."""
    text = plan_text(
        "F0 sa0 F1 sa1 rg0 X0 F2 sa2 rg1 X1 rg2 X2 reduce step",
        "ra0 ra1 F0 X0 sg0 F1 X1 ra2 sg1 F2 X2 sg2 reduce step",
        microbatches=3,
    )
    assert codes(text, transport) == []


def test_a_receive_posted_early_blocks_nobody_under_edge():
    """It waits only where its tensor is used; in a shared queue it blocks what is behind it."""
    assert codes(EARLY) == []
    assert codes(EARLY, "pair") == codes(EARLY, "rank") == ["RHP501"]


def test_early_receives_change_no_time():
    """All receives at the start: the same makespan as each right before its use."""
    late = make_plan(pp=4, microbatches=6)
    text = print_plan(late)
    for op in ("act", "grad"):
        for number in reversed(range(6)):
            recv = f"  recv_{op} {number}\n"
            blocks = text.split("stream ")
            blocks = [
                head + "{\n" + recv + rest.replace(recv, "") if recv in rest else head + "{" + rest
                for head, _, rest in (block.partition("{") for block in blocks[1:])
            ]
            text = "stream ".join([text.split("stream ")[0], *blocks]).replace("{\n\n", "{\n")
    early = parse(text)
    assert early.plan != late
    assert verify(early) == []
    assert play(lanes_of(early.plan)).makespan == play(lanes_of(late)).makespan


def test_a_plan_that_passes_pair_and_deadlocks_under_rank():
    """Stage 1 of replica 0 lists gradient 0 before activation 1, from two peers.

    Gradient 0 waits for the reduction of stage 2, that for replica 1, whose stage 1 sends only
    after its reduction, and that waits for activation 1. With transfers after reduce_grads such a
    plan is refused anyway (RHP704); without them, neighbours in a line cannot tell pair and rank
    apart.
    """
    text = plan_text(
        "F0 sa0 F1 sa1 rg0 X0 rg1 X1 reduce step",
        "ra0 F0 sa0 rg0 ra1 F1 reduce sa1 X0 sg0 rg1 X1 sg1 step",
        "ra0 F0 X0 reduce sg0 ra1 F1 X1 sg1 step",
        "F0 sa0 F1 sa1 rg0 X0 rg1 X1 reduce step",
        "ra0 F0 ra1 F1 reduce sa0 sa1 rg0 X0 sg0 rg1 X1 sg1 step",
        "ra0 ra1 F0 X0 reduce sg0 F1 X1 sg1 step",
        dp=2,
    )
    assert codes(text, "edge") == codes(text, "pair") == ["RHP704"]
    assert codes(text, "rank") == ["RHP501", "RHP704"]


def test_criss_cross_sends():
    """Both sides send first: fine if sends are posted or receives were, else both block."""
    both_send_first = CRISS_CROSS.replace("  recv_grad 0\n  send_act 1\n  BW 0\n",
                                          "  send_act 1\n  recv_grad 0\n  BW 0\n")  # fmt: skip
    both_send_first = both_send_first.replace("  recv_act 1\n  send_grad 0\n",
                                              "  send_grad 0\n  recv_act 1\n")  # fmt: skip
    assert codes(both_send_first) == codes(both_send_first, f"eager={MESSAGE_BYTES}") == []
    assert codes(both_send_first, "eager=0") == ["RHP501"]
    assert codes(both_send_first, "pair") == ["RHP501"]
    assert codes(CRISS_CROSS, "eager=0") == []
    assert codes(CRISS_CROSS, "pair") == ["RHP501"]


def test_1f1b_with_blocking_sends_needs_the_receive_first():
    """Posting the receive before the send, at either end, is what the hint proposes."""
    text = print_plan(make_plan(pp=2, microbatches=2))
    (finding,) = deadlocks(text, "eager=0")
    assert finding.hint == (
        "swap `send_act 1` (line 13) and `recv_grad 0` (line 14): the circle is gone"
    )
    mended = text.replace("  send_grad 0\n  recv_act 1\n", "  recv_act 1\n  send_grad 0\n")
    assert codes(mended, "eager=0") == []


def test_each_receives_before_it_sends():
    """Refused under every transport: nobody starts."""
    text = plan_text("F0 rg0 X0 sa0 reduce step", "ra0 F0 X0 sg0 reduce step", microbatches=1)
    for transport in TRANSPORTS:
        assert codes(text, transport) == ["RHP501"]


def test_receives_in_another_order_are_refused_by_channel_order():
    """Nothing hangs, tensors are swapped: under edge that is all there is to say."""
    text = plan_text(
        "F0 sa0 F1 sa1 rg0 X0 rg1 X1 reduce step",
        "ra1 ra0 F0 F1 X0 sg0 X1 sg1 reduce step",
    )
    assert codes(text) == ["RHP412"]
    assert codes(text, "pair") == ["RHP412", "RHP501"]


def test_a_buffer_of_some_messages():
    """Four activations against gradients that want to come back: two in flight are enough."""
    text = plan_text(
        "F0 sa0 F1 sa1 F2 sa2 F3 sa3 rg0 X0 rg1 X1 rg2 X2 rg3 X3 reduce step",
        "ra0 F0 X0 sg0 ra1 F1 X1 sg1 ra2 F2 X2 sg2 ra3 F3 X3 sg3 reduce step",
        microbatches=4,
    )
    for num_messages, expected in enumerate((["RHP501"], ["RHP501"], [], [])):
        assert codes(text, f"eager={num_messages * MESSAGE_BYTES}") == expected


def test_small_tensors_pass_where_large_ones_hang():
    """The same plan with twice the tokens outgrows the buffer; facts say otherwise if given."""
    streams = ("F0 sa0 F1 sa1 rg0 X0 rg1 X1 reduce step", "ra0 F0 X0 sg0 ra1 F1 X1 sg1 reduce step")
    small, large = plan_text(*streams), plan_text(*streams, tokens=32)
    assert codes(small, "eager=4KiB") == []
    assert codes(large, "eager=4KiB") == ["RHP501"]
    assert codes(large, "eager=8KiB") == []

    def half_precision(plan: Plan) -> Facts:
        sizes = StageFacts(
            state_bytes=0,
            activation_bytes=0,
            released_by_b_bytes=0,
            weight_input_grad_bytes=0,
            boundary_bytes=plan.batch.tokens * plan.model.hidden * 2,
        )
        return Facts(stages={group.name: (sizes,) for group in plan.groups})

    assert verify(parse(large), transport="eager=4KiB", facts=half_precision) == []


def test_chunks_take_their_share_of_the_buffer():
    """Cut in two, twice as many tensors fit."""
    plan = make_plan(pp=2, tp=2, microbatches=2, scatter=True)
    assert codes(print_plan(plan), f"eager={MESSAGE_BYTES // 2}") == []
    assert codes(print_plan(plan), f"eager={MESSAGE_BYTES // 2 - 1}") == ["RHP501"]


def test_a_deadlock_through_reduce_grads():
    """Replica 0 reduces stage 0 too early, replica 1 stage 1: each holds up the other."""
    text = plan_text(
        "F0 reduce sa0 rg0 X0 step",
        "ra0 F0 X0 sg0 reduce step",
        "F0 sa0 rg0 X0 reduce step",
        "ra0 F0 X0 reduce sg0 step",
        dp=2,
        microbatches=1,
    )
    (finding,) = deadlocks(text)
    assert finding.message == (
        "deadlock: dp0.pp0 waits for dp1.pp0, which waits for dp1.pp1, which waits for dp0.pp1, "
        "which waits for dp0.pp0"
    )
    assert finding.related[0].message == (
        "dp0.pp0 waits here for `reduce_grads` of dp1.pp0 (line 30), which comes after `BW 0` "
        "(line 29)"
    )
    early = text.replace("  BW 0\n  reduce_grads\n  send_grad 0\n",
                         "  BW 0\n  send_grad 0\n  reduce_grads\n")  # fmt: skip
    assert deadlocks(early) == []


def test_the_shortest_circle_is_told():
    """Two streams that wait for each other, though a longer circle leads through them too."""
    text = plan_text(
        "F0 rg0 X0 sa0 reduce step",
        "ra0 F0 rg0 X0 sa0 sg0 reduce step",
        "ra0 F0 X0 sg0 reduce step",
        microbatches=1,
    )
    (finding,) = deadlocks(text)
    assert len(finding.related) == 2


def test_separate_circles_are_reported_separately():
    """One finding per replica that hangs for its own reason."""
    bad = ("F0 rg0 X0 sa0 reduce step", "ra0 F0 X0 sg0 reduce step")
    other = ("F0 rg0 X0 sa0 reduce step", "ra0 F0 X0 sg0 reduce step")
    assert len(deadlocks(plan_text(*bad, *other, dp=2, microbatches=1))) == 1
    other = ("rg0 F0 X0 sa0 reduce step", "ra0 F0 X0 sg0 reduce step")
    assert len(deadlocks(plan_text(*bad, *other, dp=2, microbatches=1))) == 2


def test_queues_are_told_link_by_link():
    """Under pair the heads of the queues wait for each other."""
    (finding,) = deadlocks(CRISS_CROSS, "pair")
    assert finding.message == (
        "deadlock under transport `pair`: dp0.pp0 waits for dp0.pp1, which waits for dp0.pp0"
    )
    assert [note.message for note in finding.related] == [
        "the queue of dp0.pp0 waits here for `send_grad 0` of dp0.pp1 (line 24), which is queued "
        "behind `recv_act 1` (line 23)",
        "the queue of dp0.pp1 waits here for `send_act 1` of dp0.pp0 (line 12), which is queued "
        "behind `recv_grad 0` (line 11)",
    ]
    assert finding.hint == (
        "swap `recv_act 1` (line 23) and `send_grad 0` (line 24): the circle is gone"
    )


def test_a_swap_is_proposed_for_all_replicas_that_read_the_same():
    """Each has its own text: the swap mends the plan only if it is made in all of them."""
    bad = ("F0 rg0 X0 sa0 reduce step", "ra0 F0 X0 sg0 reduce step")
    (finding,) = deadlocks(plan_text(*bad, *bad, *bad, dp=3, microbatches=1))
    assert finding.message.endswith("(and in replicas 1,2)")
    assert finding.hint == (
        "swap `BW 0` (line 14) and `send_act 0` (line 15), in each replica: the circle is gone"
    )


def test_a_swap_is_found_for_each_of_several_circles():
    """Mending one replica is proposed though another still hangs."""
    bad = ("F0 rg0 X0 sa0 reduce step", "ra0 F0 X0 sg0 reduce step")
    other = ("rg0 F0 X0 sa0 reduce step", "ra0 F0 X0 sg0 reduce step")
    for finding in deadlocks(plan_text(*bad, *other, dp=2, microbatches=1)):
        assert (finding.hint or "").startswith("swap `BW 0`")


# --- names of transports


@pytest.mark.parametrize(
    ("text", "transport"),
    [
        ("edge", Transport("edge")),
        ("pair", Transport("pair")),
        ("rank", Transport("rank")),
        ("eager=0", Transport("eager", 0)),
        ("eager=65536", Transport("eager", 65536)),
        ("eager=4MiB", Transport("eager", 4 << 20)),
        ("eager=3KiB", Transport("eager", 3 << 10)),
        ("eager=2GiB", Transport("eager", 2 << 30)),
    ],
)
def test_a_transport_is_read_and_written(text, transport):
    """Reading what is written gives the same one."""
    assert parse_transport(text) == transport
    assert parse_transport(str(transport)) == transport


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("edges", "unknown transport `edges`; the verifier knows `edge`, `pair`, `rank`, `eager="),
        ("", "unknown transport ``"),
        ("edge=4", "transport `edge=4`: `edge` takes no value"),
        ("eager", "the buffer of a rank pair is a whole number of bytes"),
        ("eager=", "such as `eager=65536` or `eager=4MiB`"),
        ("eager=BYTES", "is a whole number of bytes"),
        ("eager=4MB", "is a whole number of bytes"),
        ("eager=-1", "is a whole number of bytes"),
        ("eager=1.5MiB", "is a whole number of bytes"),
        ("eager=9999999999999999", "is a whole number of bytes"),
    ],
)
def test_a_transport_that_cannot_be_is_refused(text, message):
    """What is wrong and what is possible."""
    with pytest.raises(UserError, match=re.escape(message)):
        verify(parse(EARLY), transport=text)
