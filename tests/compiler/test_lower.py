"""From orders to streams: which transfers stand where, and who runs whose micro-batches."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import plan_of

from resihp.compiler import home_work, lower, spread_work
from resihp.ir.model import Group, Instr, LayerRange, Op, Stream


def group(replica: int, stage: int, *ranks: int) -> Group:
    return Group(replica=replica, pp=stage, ranks=ranks, layers=(LayerRange(stage, stage),))


def text(stream: Stream) -> list[str]:
    return [spelled(instr) for instr in stream.body]


def spelled(instr: Instr) -> str:
    if instr.microbatch is None:
        return instr.op.mnemonic
    at = "" if instr.home is None else f"@{instr.home}"
    return f"{instr.op.mnemonic} {instr.microbatch}{at}"


def test_between_equal_degrees_transfers_are_direct():
    """A receive stands right before its use, a send right after what it sends."""
    first, last = lower([group(0, 0, 0, 1), group(0, 1, 2, 3)], home_work([0], 1), "zb-h1", 2)
    assert text(first) == [
        "F 0", "send_act 0", "recv_grad 0", "B 0", "W 0", "reduce_grads", "step",
    ]  # fmt: skip
    assert text(last) == [
        "recv_act 0", "F 0", "B 0", "send_grad 0", "W 0", "reduce_grads", "step",
    ]  # fmt: skip


def test_between_unequal_degrees_the_sender_scatters_and_the_receiver_gathers():
    """Both ends of both directions are cut, whichever has the larger degree."""
    first, last = lower([group(0, 0, 0, 1), group(0, 1, 2)], home_work([0], 1), "1f1b", 2)
    assert text(first) == [
        "F 0", "scatter_act 0", "send_act 0",
        "recv_grad 0", "gather_grad 0", "BW 0", "reduce_grads", "step",
    ]  # fmt: skip
    assert text(last) == [
        "recv_act 0", "gather_act 0", "F 0",
        "BW 0", "scatter_grad 0", "send_grad 0", "reduce_grads", "step",
    ]  # fmt: skip


def test_a_middle_stage_treats_each_side_by_its_own_degrees():
    """One edge may be cut and the other direct."""
    groups = [group(0, 0, 0, 1), group(0, 1, 2, 3), group(0, 2, 4)]
    middle = lower(groups, home_work([0], 1), "gpipe", 3)[1]
    assert text(middle) == [
        "recv_act 0", "F 0", "scatter_act 0", "send_act 0",
        "recv_grad 0", "gather_grad 0", "BW 0", "send_grad 0", "reduce_grads", "step",
    ]  # fmt: skip


def test_replicas_that_do_the_same_share_a_stream():
    """One body per stage for healthy replicas; a smaller group makes its pipeline differ."""
    healthy = plan_of(dp=3)
    assert [(s.replicas, s.pp) for s in healthy.streams] == [((0, 1, 2), 0), ((0, 1, 2), 1)]
    groups = [
        msgspec.structs.replace(g, ranks=g.ranks[:1]) if g.name == (1, 1) else g
        for g in healthy.groups
    ]
    streams = lower(groups, home_work(range(3), 4), "1f1b", 2)
    assert [(s.replicas, s.pp) for s in streams] == [
        ((0, 2), 0), ((0, 2), 1), ((1,), 0), ((1,), 1),
    ]  # fmt: skip


def test_foreign_micro_batches_are_named_by_their_home():
    """They run after the replica's own ones, in the same schedule."""
    (stream,) = lower([group(0, 0, 0)], spread_work([0], 2, 2), "1f1b", 1)
    assert text(stream) == [
        "F 0", "BW 0", "F 1", "BW 1", "F 0@1", "BW 0@1", "F 1@1", "BW 1@1", "reduce_grads", "step",
    ]  # fmt: skip


@given(st.data(), st.integers(1, 6), st.integers(1, 7))
def test_work_is_spread_evenly_and_completely(data, num_replicas, num_microbatches):
    """Every micro-batch of every home runs once, own ones first, loads differ by at most one."""
    left = sorted(data.draw(st.sets(st.integers(0, num_replicas - 1), min_size=1)))
    work = spread_work(left, num_replicas, num_microbatches)
    assert sorted(work) == left
    everything = sorted(item for items in work.values() for item in items)
    assert everything == [(h, n) for h in range(num_replicas) for n in range(num_microbatches)]
    loads = [len(items) for items in work.values()]
    assert max(loads) - min(loads) <= 1
    for replica, items in work.items():
        assert items[:num_microbatches] == [(replica, n) for n in range(num_microbatches)]
        assert items[num_microbatches:] == sorted(items[num_microbatches:])


def test_every_stream_ends_with_reduction_and_step():
    """Gradients are summed once, then all ranks step together."""
    for stream in plan_of(pp=3).streams:
        assert [instr.op for instr in stream.body[-2:]] == [Op.REDUCE_GRADS, Op.STEP]
