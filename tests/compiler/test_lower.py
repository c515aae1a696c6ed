"""From orders to streams: which transfers stand where, what is cut, when gradients are reduced."""

from __future__ import annotations

import msgspec
import pytest
from plan_cases import ONE_STAGE_SCHEDULES, findings, model_of, plan_of, streams_of

from resihp.compiler import home_work, lower, ordered, spread_work
from resihp.compiler.cluster import Cluster, ClusterSize, Device, Health, Link
from resihp.compiler.costs import CostModel
from resihp.compiler.lower import PASSES, everywhere
from resihp.compiler.models import find_model
from resihp.compiler.pricing import Pricing
from resihp.errors import UserError
from resihp.ir.model import Batch, Group, GroupName, LayerRange, Mesh, Op, Plan
from resihp.ir.parser import parse

HEADER = """schedule 1
model tiny layers=4 hidden=64 heads=8 kv_heads=8 ffn=96 vocab=272
mesh tp=2 pp=2 dp={dp}
batch microbatches=2 tokens=32
"""
ONE_STAGE_GROUPS = "group dp0.pp0 ranks=0,1 layers=0..1\ngroup dp0.pp1 ranks=2,3 layers=2..3\n"
LOOP = "group dp0.pp0 ranks=0,1 layers=0..0,2..2\ngroup dp0.pp1 ranks=2,3 layers=1..1,3..3\n"
V = "group dp0.pp0 ranks=0,1 layers=0..0,3..3\ngroup dp0.pp1 ranks=2,3 layers=1..1,2..2\n"


def group(replica: int, pp: int, *ranks: int) -> Group:
    return Group(replica=replica, pp=pp, ranks=ranks, layers=(LayerRange(pp, pp),))


def lowered(groups: list[Group], microbatches: int, kind: str) -> list[list[str]]:
    """The lines of each stream of a replica that runs its own micro-batches."""
    num_positions = len({group.pp for group in groups})
    plan = Plan(
        model=model_of(layers=num_positions),
        mesh=Mesh(tp=2, pp=num_positions, dp=1),
        batch=Batch(microbatches=microbatches, tokens=32),
        groups=tuple(groups),
        streams=(),
    )
    return list(streams_of(lower(ordered(plan, kind, home_work([0], microbatches)))).values())


def by_hand(text: str, transport: str = "edge") -> dict[str, list[str]]:
    """The lowered streams of a schedule; each line of `text` is `dp pp: instructions`."""
    head, *streams = text.strip().split("\nstream ")
    for stream in streams:
        where, body = stream.split(":")
        replica, pp = where.split()
        lines = "\n".join(body.split(","))
        head += f"\nstream dp={replica} pp={pp} {{\n{lines}\n}}"
    plan = msgspec.structs.replace(parse(head + "\n").plan, transport=transport)
    return streams_of(lower(plan))


def test_between_equal_degrees_transfers_are_direct():
    """A receive stands right before its use, a send right after what it sends."""
    first, last = lowered([group(0, 0, 0, 1), group(0, 1, 2, 3)], 1, "zb-h1")
    assert first == ["F 0", "send_act 0", "recv_grad 0", "B 0", "W 0", "reduce_grads", "step"]
    assert last == [
        "recv_act 0", "F 0", "B 0", "send_grad 0", "W 0", "reduce_grads", "step",
    ]  # fmt: skip


def test_between_unequal_degrees_the_sender_scatters_and_the_receiver_gathers():
    """Both ends of both directions are cut, whichever has the larger degree."""
    first, last = lowered([group(0, 0, 0, 1), group(0, 1, 2)], 1, "1f1b")
    assert first == [
        "F 0", "scatter_act 0", "send_act 0",
        "recv_grad 0", "gather_grad 0", "BW 0", "reduce_grads", "step",
    ]  # fmt: skip
    assert last == [
        "recv_act 0", "gather_act 0", "F 0",
        "BW 0", "scatter_grad 0", "send_grad 0", "reduce_grads", "step",
    ]  # fmt: skip


def test_a_middle_stage_treats_each_side_by_its_own_degrees():
    """One edge may be cut and the other direct."""
    groups = [group(0, 0, 0, 1), group(0, 1, 2, 3), group(0, 2, 4)]
    assert lowered(groups, 1, "gpipe")[1] == [
        "recv_act 0", "F 0", "scatter_act 0", "send_act 0",
        "recv_grad 0", "gather_grad 0", "BW 0", "send_grad 0", "reduce_grads", "step",
    ]  # fmt: skip


def test_everything_above_one_rank_is_cut_where_that_is_wished():
    """Scattering halves what each rank pair carries between equal degrees too."""
    plan = plan_of(tp=2, pp=2, dp=1, microbatches=1)
    schedule = ordered(plan, "1f1b", home_work([0], 1))
    first = streams_of(lower(schedule, scatter=everywhere))["dp0.pp0"]
    assert first[:3] == ["F 0", "scatter_act 0", "send_act 0"]
    odd = msgspec.structs.replace(schedule, batch=Batch(microbatches=1, tokens=31))
    assert streams_of(lower(odd, scatter=everywhere)) == streams_of(lower(odd))


def test_the_plan_cuts_where_pricing_says_that_it_is_faster():
    """Two groups of two ranks on each node: whole inside it, cut over its one adapter."""
    schedule = ordered(plan_of(tp=2, pp=3, dp=1, microbatches=1), "1f1b", home_work([0], 1))
    plan = lower(schedule, scatter=pricing_of(schedule).scatter(schedule.batch.tokens))
    streams = streams_of(plan)
    assert not any("scatter_act" in line for line in streams["dp0.pp0"])
    assert "scatter_act 0" in streams["dp0.pp1"]
    assert "scatter_grad 0" in streams["dp0.pp2"]
    assert not any("scatter_grad" in line for line in streams["dp0.pp1"])
    assert findings(plan) == []


def test_replicas_that_differ_in_where_they_cut_have_streams_of_their_own():
    """Replica 1 lies inside one node, replicas 0 and 2 across two."""
    schedule = ordered(plan_of(tp=2, pp=2, dp=3, microbatches=2), "zb-h1", home_work(range(3), 2))

    def across(sender: Group, receiver: Group) -> bool:
        return sender.replica != 1

    plan = lower(schedule, scatter=across)
    assert [(s.replicas, s.pp) for s in plan.streams] == [
        ((0, 2), 0), ((0, 2), 1), ((1,), 0), ((1,), 1),
    ]  # fmt: skip
    direct, cut = streams_of(lower(schedule)), streams_of(lower(schedule, scatter=everywhere))
    assert streams_of(plan)["dp1.pp0"] == direct["dp1.pp0"]
    assert streams_of(plan)["dp0.pp0"] == cut["dp0.pp0"]
    assert findings(plan) == []


def pricing_of(plan: Plan) -> Pricing:
    """Nodes of four devices with one adapter each."""
    cluster = Cluster(
        cluster=ClusterSize(name="small", nodes=8, gpus_per_node=4, nics_per_node=1),
        device=Device(memory_gib=80, bf16_tflops=100, fp32_tflops=50),
        intra_node=Link(gb_per_s=200, latency_us=1),
        inter_node=Link(gb_per_s=1, latency_us=1),
    )
    model = find_model("llama2-7b")
    costs = CostModel.of_description(model, cluster)
    return Pricing(plan.model, costs, cluster, Health())


def test_replicas_that_do_the_same_share_a_stream():
    """One body per position for healthy replicas; a smaller group makes its pipeline differ."""
    healthy = plan_of(dp=3)
    assert [(s.replicas, s.pp) for s in healthy.streams] == [((0, 1, 2), 0), ((0, 1, 2), 1)]
    groups = tuple(
        msgspec.structs.replace(g, ranks=g.ranks[:1]) if g.name == (1, 1) else g
        for g in healthy.groups
    )
    smaller = msgspec.structs.replace(healthy, groups=groups)
    plan = lower(ordered(smaller, "1f1b", home_work(range(3), 4)))
    assert [(s.replicas, s.pp) for s in plan.streams] == [
        ((0, 2), 0), ((0, 2), 1), ((1,), 0), ((1,), 1),
    ]  # fmt: skip


def test_a_stream_is_shared_where_only_other_positions_differ():
    """Replica 1 has a smaller last group; its first position does not notice."""
    plan = plan_of(tp=2, pp=3, dp=2)
    groups = tuple(
        msgspec.structs.replace(g, ranks=g.ranks[:1]) if g.name == (1, 2) else g
        for g in plan.groups
    )
    smaller = msgspec.structs.replace(plan, groups=groups)
    streams = lower(ordered(smaller, "1f1b", home_work(range(2), 4))).streams
    assert [s.replicas for s in streams if s.pp == 0] == [(0, 1)]
    assert [s.replicas for s in streams if s.pp == 1] == [(0,), (1,)]


def test_foreign_micro_batches_are_named_by_their_home():
    """They run after the replica's own ones, in the same schedule."""
    plan = plan_of(tp=1, pp=1, dp=1, microbatches=2)
    (stream,) = streams_of(lower(ordered(plan, "1f1b", spread_work([0], 2, 2)))).values()
    assert stream == [
        "F 0", "BW 0", "F 1", "BW 1", "F 0@1", "BW 0@1", "F 1@1", "BW 1@1", "reduce_grads", "step",
    ]  # fmt: skip


def test_every_stream_ends_with_reduction_and_step():
    """Gradients are summed once, then all ranks step together."""
    for stream in plan_of(pp=3).streams:
        assert [instr.op for instr in stream.body[-2:]] == [Op.REDUCE_GRADS, Op.STEP]


def test_a_group_hands_over_to_itself_without_a_transfer():
    """At the bottom of a V nothing is sent from stage 1 to stage 2."""
    streams = by_hand(
        HEADER.format(dp=1)
        + V
        + """
stream 0 0: F[0] 0, F[3] 0, BW[3] 0, BW[0] 0, F[0] 1, F[3] 1, BW[3] 1, BW[0] 1
stream 0 1: F[1] 0, F[2] 0, BW[2] 0, BW[1] 0, F[1] 1, F[2] 1, BW[2] 1, BW[1] 1
"""
    )
    assert streams["dp0.pp1"][:8] == [
        "recv_act[1] 0", "F[1] 0", "F[2] 0", "send_act[2] 0",
        "recv_grad[2] 0", "BW[2] 0", "BW[1] 0", "send_grad[1] 0",
    ]  # fmt: skip


def test_a_receive_moves_forward_where_its_channel_brings_it_earlier():
    """Position 0 sends activation 0 before 1, and position 1 uses 1 first."""
    streams = by_hand(
        HEADER.format(dp=1)
        + ONE_STAGE_GROUPS
        + """
stream 0 0: F 0, F 1, BW 1, BW 0
stream 0 1: F 1, BW 1, F 0, BW 0
"""
    )
    assert streams["dp0.pp1"] == [
        "recv_act 0", "recv_act 1", "F 1", "BW 1", "send_grad 1", "F 0", "BW 0", "send_grad 0",
        "reduce_grads", "step",
    ]  # fmt: skip


def test_all_stages_and_both_kinds_between_two_groups_share_one_channel():
    """Activation 1 to stage 1 leaves before that to stage 3, so it is received before it."""
    streams = by_hand(
        HEADER.format(dp=1)
        + LOOP
        + """
stream 0 0: F[0] 0, F[0] 1, F[2] 0, F[2] 1, BW[2] 0, BW[2] 1, BW[0] 0, BW[0] 1
stream 0 1: F[1] 0, F[1] 1, F[3] 0, BW[3] 0, F[3] 1, BW[3] 1, BW[1] 0, BW[1] 1
"""
    )
    assert streams["dp0.pp0"][4:8] == [
        "recv_act[2] 0", "F[2] 0", "send_act[2] 0", "recv_act[2] 1",
    ]  # fmt: skip
    assert streams["dp0.pp1"][6:11] == [
        "recv_act[3] 0", "F[3] 0", "BW[3] 0", "send_grad[3] 0", "recv_act[3] 1",
    ]  # fmt: skip


@pytest.mark.parametrize("transport", ["pair", "rank", "eager=0", "eager=4MiB"])
def test_under_other_transports_both_ends_are_listed_when_the_tensor_is_made(transport):
    """1F1B: activation 1 is made before gradient 0, so it is received before that is sent."""
    streams = by_hand(
        HEADER.format(dp=1)
        + ONE_STAGE_GROUPS
        + """
stream 0 0: F 0, F 1, BW 0, BW 1
stream 0 1: F 0, BW 0, F 1, BW 1
""",
        transport,
    )
    assert streams["dp0.pp0"] == [
        "F 0", "send_act 0", "F 1", "send_act 1", "recv_grad 0", "BW 0", "recv_grad 1", "BW 1",
        "reduce_grads", "step",
    ]  # fmt: skip
    assert streams["dp0.pp1"] == [
        "recv_act 0", "recv_act 1", "F 0", "BW 0", "send_grad 0", "F 1", "BW 1", "send_grad 1",
        "reduce_grads", "step",
    ]  # fmt: skip


def test_chunks_are_joined_right_before_the_use_however_early_they_come():
    """Until then a member holds its own chunks only."""
    smaller = ONE_STAGE_GROUPS.replace("2,3 ", "2 ") + "standby 3\n"
    streams = by_hand(
        HEADER.format(dp=1)
        + smaller
        + """
stream 0 0: F 0, F 1, BW 1, BW 0
stream 0 1: F 1, BW 1, F 0, BW 0
"""
    )
    assert streams["dp0.pp1"][:8] == [
        "recv_act 0", "recv_act 1", "gather_act 1", "F 1", "BW 1", "scatter_grad 1", "send_grad 1",
        "gather_act 0",
    ]  # fmt: skip


def test_transfers_of_a_pair_stand_around_it():
    """Nothing comes between two overlapped instructions."""
    streams = by_hand(
        HEADER.format(dp=1)
        + ONE_STAGE_GROUPS
        + """
stream 0 0: F 0, F 1, BW 0, BW 1
stream 0 1: F 0, BW 0 & F 1, BW 1
"""
    )
    assert streams["dp0.pp1"][2:7] == [
        "recv_act 1", "BW 0 & F 1", "send_grad 0", "BW 1", "send_grad 1",
    ]  # fmt: skip


def test_a_migrated_micro_batch_names_the_replicas_that_it_comes_from_and_goes_to():
    """Only stage 1 of micro-batch 0@1 runs in replica 0; replica 1 lacks that position."""
    groups = ONE_STAGE_GROUPS + "group dp1.pp0 ranks=4,5 layers=0..1\nstandby 6,7\n"
    streams = by_hand(
        HEADER.format(dp=2).replace("=2 tokens", "=1 tokens")
        + groups
        + """
stream 0 0: F 0, BW 0
stream 1 0: F 0, BW 0
stream 0 1: F 0, F 0@1, BW 0, BW 0@1
"""
    )
    assert streams["dp0.pp1"] == [
        "recv_act 0", "F 0", "recv_act 0@1 <- dp1", "F 0@1",
        "BW 0", "send_grad 0", "BW 0@1", "send_grad 0@1 -> dp1", "reduce_grads", "step",
    ]  # fmt: skip
    assert streams["dp1.pp0"] == [
        "F 0", "send_act 0 -> dp0", "recv_grad 0 <- dp0", "BW 0", "reduce_grads", "step",
    ]  # fmt: skip


def test_a_stage_is_reduced_once_its_last_gradient_is_there_anywhere():
    """Replica 0 is done with stage 3 first, but not before replica 1 is; stage 0 goes on."""
    groups = V + V.replace("dp0", "dp1").replace("0,1 ", "4,5 ").replace("2,3 ", "6,7 ")
    groups = "\n".join(sorted(groups.splitlines())) + "\n"
    streams = by_hand(
        HEADER.format(dp=2).replace("=2 tokens", "=1 tokens")
        + groups
        + """
stream 0 0: F[0] 0, F[3] 0, B[3] 0, W[3] 0, B[0] 0, W[0] 0
stream 1 0: F[0] 0, F[3] 0, B[3] 0, B[0] 0, W[3] 0, W[0] 0
stream 0,1 1: F[1] 0, F[2] 0, BW[2] 0, BW[1] 0
"""
    )
    assert streams["dp1.pp0"][-5:] == [
        "W[3] 0", "reduce_grads[3]", "W[0] 0", "reduce_grads[0]", "step",
    ]  # fmt: skip
    assert streams["dp0.pp0"][-5:] == [
        "B[0] 0", "W[0] 0", "reduce_grads[3]", "reduce_grads[0]", "step",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["zbv", "interleaved-1f1b"])
def test_equal_replicas_of_several_stages_reduce_right_after_the_last_gradient(kind):
    """Nobody has to be waited for."""
    plan = plan_of(tp=1, pp=2, dp=2, schedule=kind, memory_bytes=None)
    for stream in plan.streams:
        for index, instr in enumerate(stream.body):
            if instr.op is Op.REDUCE_GRADS:
                before = [x.stage for x in stream.body[:index] if x.op in (Op.W, Op.BW)]
                assert instr.stage in before
                assert instr.stage not in [x.stage for x in stream.body[index + 1 :]]


def test_what_each_pass_adds_can_be_seen():
    """Reductions first, then transfers, then what cuts and joins."""
    groups = (group(0, 0, 0, 1), group(0, 1, 2))
    plan = Plan(
        model=model_of(layers=2),
        mesh=Mesh(tp=2, pp=2, dp=1),
        batch=Batch(microbatches=1, tokens=32),
        groups=groups,
        streams=(),
    )
    plan = ordered(plan, "1f1b", home_work([0], 1))
    seen = [(name, streams_of(lower(plan, last_pass=name))["dp0.pp0"]) for name in PASSES]
    assert seen == [
        ("finish", ["F 0", "BW 0", "reduce_grads", "step"]),
        ("transfers", ["F 0", "send_act 0", "recv_grad 0", "BW 0", "reduce_grads", "step"]),
        ("chunks", ["F 0", "scatter_act 0", "send_act 0", "recv_grad 0", "gather_grad 0", "BW 0",
                    "reduce_grads", "step"]),
    ]  # fmt: skip


def test_a_plan_is_not_lowered_again():
    """The message says what can be lowered."""
    with pytest.raises(UserError, match=r"a plan already: .* `schedule 1`"):
        lower(plan_of())


WAITING = (
    HEADER.format(dp=1)
    + ONE_STAGE_GROUPS
    + """
stream 0 0: F 0, BW 0, F 1, BW 1
stream 0 1: F 1, BW 1, F 0, BW 0
"""
)


def test_a_schedule_that_waits_for_itself_has_no_common_order():
    """Played, it stops; the message names a place and what tells more."""
    with pytest.raises(UserError, match=r"`BW 0` in dp0\.pp0 waits for ever; `resihp verify`"):
        by_hand(WAITING, "rank")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("F 0, F 1, BW 1", "`BW 0` in dp0.pp1 makes what nobody uses"),
        ("F 0, BW 0, BW 1", "`F 1` in dp0.pp1 needs what nobody makes"),
    ],
)
def test_a_tensor_with_one_end_is_refused(body, message):
    """An unverified schedule gives a message, never a wrong plan."""
    text = (
        HEADER.format(dp=1)
        + ONE_STAGE_GROUPS
        + f"""
stream 0 0: {body}
stream 0 1: F 0, BW 0, F 1, BW 1
"""
    )
    with pytest.raises(UserError, match=message):
        by_hand(text)


def test_a_large_healthy_job_has_one_body_per_position():
    """128 replicas cost what one does."""
    plan = plan_of(tp=1, pp=6, dp=128, microbatches=8)
    assert len(plan.streams) == 6
    assert all(len(stream.replicas) == 128 for stream in plan.streams)


@pytest.mark.parametrize("schedule", ONE_STAGE_SCHEDULES)
def test_the_healthy_plan_is_the_lowered_schedule(schedule):
    """The compiler has one way down."""
    plan = plan_of(schedule=schedule)
    again = lower(ordered(plan, schedule, home_work(range(2), 4)))
    assert again == plan
    assert streams_of(plan)[str(GroupName(1, 1))] == streams_of(plan)["dp0.pp1"]
