"""Messages between devices that run behind their hosts, and the links that carry them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_generator import generate
from slow_device import SlowLink, SlowPair, SlowQueue, launch

from resihp.compiler import initial_plan
from resihp.errors import ConfigError, GenerationClosed, PeerLost
from resihp.executor.device.edge_wire import EdgeWire, KeptQueues
from resihp.executor.device.edges import MAX_EDGES, Edge, check_edges, edges_of, plan_edges
from resihp.executor.device.interface import Tag
from resihp.executor.device.issuing import IssuingStream
from resihp.ir.expand import expand
from resihp.ir.model import Batch, Mesh, ModelShape, Op, Plan

RANKS = 3
NUM_MESSAGES = 20


def tag(number: int) -> Tag:
    return Tag(kind=int(Op.SEND_ACT), step=0, stage=0, home=0, microbatch=number, chunk=0)


@pytest.fixture
def wires() -> list[tuple[IssuingStream, EdgeWire]]:
    """A chain of ranks, linked both ways."""
    pairs = {(a, b): SlowPair() for a in range(RANKS) for b in range(RANKS) if abs(a - b) == 1}
    made = []
    for rank in range(RANKS):
        compute = IssuingStream(f"compute {rank}", SlowQueue())
        outgoing = {b: SlowLink(pair) for (a, b), pair in pairs.items() if a == rank}
        incoming = {a: SlowLink(pair) for (a, b), pair in pairs.items() if b == rank}
        made.append((compute, EdgeWire(compute, outgoing, incoming)))
    return made


def added(values: list[int], amount: int) -> list[int]:
    """A kernel that makes a new tensor; filled when the device comes to it."""
    out = [0] * len(values)
    launch(lambda: out.__setitem__(slice(None), [value + amount for value in values]))
    return out


def test_a_pipeline_runs_ahead_of_its_devices(wires):
    """Rank after rank adds 1 and hands on; all is queued before anything is awaited."""
    first, middle, last = wires
    results = []
    for number in range(NUM_MESSAGES):
        compute, wire = first
        made = compute.submit(lambda n=number: added([n, 10 * n], 1), label=0)
        wire.send(1, tag(number), made)
        compute, wire = middle
        arrived = wire.receive(0, tag(number), 2)
        made = compute.submit(lambda a=arrived: added(a.wait(), 1), waits=[arrived], label=0)
        wire.send(2, tag(number), made)
        compute, wire = last
        arrived = wire.receive(1, tag(number), 2)
        results.append(
            compute.submit(lambda a=arrived: added(a.wait(), 1), waits=[arrived], label=0)
        )
    for number, result in enumerate(results):
        out = result.wait()
        result.mark.synchronize()
        assert out == [number + 3, 10 * number + 3]


def test_a_receive_holds_up_only_who_needs_it(wires):
    """It waits on a queue of its own: compute goes on, on the host and on the device."""
    _, (compute, wire), _ = wires
    arrived = wire.receive(0, tag(0), 1)
    done = compute.submit(lambda: launch(lambda: None), label=0)
    done.wait()
    done.mark.synchronize()
    assert arrived.done
    assert not arrived.mark.query()
    sender, other_wire = wires[0]
    other_wire.send(1, tag(0), sender.submit(lambda: added([41], 1)))
    arrived.mark.synchronize()
    assert arrived.wait() == [42]


def test_a_send_cuts_and_keeps_its_tensor(wires):
    """The message is the part; its memory is used on the link's queue."""
    (compute, wire), (_, other), _ = wires
    made = compute.submit(lambda: added([1, 2, 3, 4], 0))
    sent = wire.send(1, tag(0), made, lambda tensor: tensor)
    sent.wait()
    arrived = other.receive(0, tag(0), 4)
    arrived.wait()
    arrived.mark.synchronize()
    assert arrived.wait() == [1, 2, 3, 4]
    (link,) = [link for peer, link in wire._outgoing.items() if peer == 1]
    assert link.queue.used == [made.wait()]
    assert link.queue.waited == [made.mark]


def test_a_peer_without_a_link_is_lost(wires):
    """Both ways, and it ends the iteration as any lost peer does."""
    compute, wire = wires[0]
    errors = []
    compute.on_error = errors.append
    with pytest.raises(PeerLost, match="rank 2"):
        wire.receive(2, tag(0), 1).wait()
    assert [type(error) for error in errors] == [PeerLost]


def test_after_the_end_nothing_is_posted(wires):
    """Sends and receives of a generation that is over fail."""
    compute, wire = wires[1]
    made = compute.submit(lambda: added([1], 0))
    wire.end()
    with pytest.raises(GenerationClosed):
        wire.send(2, tag(0), made).wait()
    with pytest.raises(GenerationClosed):
        wire.receive(0, tag(0), 1).wait()


def test_every_generation_has_the_same_queues():
    """A device has few; one more or less pair makes or leaves one, the others stay."""
    queues = KeptQueues(SlowQueue)
    first = queues.first(3)
    assert len(set(first)) == 3
    assert queues.first(2) == first[:2]
    more = queues.first(4)
    assert more[:3] == first
    assert len(set(more)) == 4


# --- which links there are, and the order in which they are made

SHAPE = ModelShape(name="tiny", layers=8, hidden=64, heads=8, kv_heads=8, ffn=64, vocab=272)


def plan_of(tp: int, pp: int, schedule: str) -> Plan:
    batch = Batch(microbatches=4, tokens=64)
    return initial_plan(SHAPE, Mesh(tp=tp, pp=pp, dp=1), batch, schedule=schedule)


def meets(plan: Plan) -> list[Edge]:
    """The pairs in an order in which they come about, where each rank waits at its next one."""
    lists = {rank: edges_of(plan, rank) for rank in plan.active_ranks}
    made: list[Edge] = []
    while any(lists.values()):
        heads = [edges[0] for edges in lists.values() if edges]
        ready = [edge for edge in heads if heads.count(edge) == 2]
        assert ready, f"all ranks wait: {heads}"
        for end in ready[0]:
            lists[end].remove(ready[0])
        made.append(ready[0])
    return made


@settings(max_examples=40)
@given(st.integers(0, 1 << 32))
def test_links_come_about_without_a_circle(seed):
    """Whoever waits for whom, every pair of a random plan is made, once."""
    plan = generate(random.Random(seed))
    assert sorted(meets(plan)) == sorted(plan_edges(plan))


def test_every_message_of_a_program_has_its_link():
    """Sends have an outgoing pair, receives an incoming one."""
    plan = plan_of(2, 3, "zb-h1")
    for rank in plan.active_ranks:
        edges = edges_of(plan, rank)
        for instr in expand(plan, rank).instrs:
            for transfer in instr.transfers:
                is_send = instr.op in (Op.SEND_ACT, Op.SEND_GRAD)
                is_receive = instr.op in (Op.RECV_ACT, Op.RECV_GRAD)
                assert not is_send or Edge(rank, transfer.peer) in edges
                assert not is_receive or Edge(transfer.peer, rank) in edges


def test_links_are_made_in_the_order_of_their_first_use():
    """The pipeline fills from its first stage on."""
    edges = plan_edges(plan_of(1, 4, "1f1b"))
    forward = [edge for edge in edges if edge.source < edge.target]
    assert forward == [Edge(a, b) for a, b in pairwise(range(4))]


def test_a_rank_with_more_pairs_than_streams_is_refused():
    """By every rank, also by those with few: the others must not wait for them."""
    star = [Edge(0, peer) for peer in range(1, MAX_EDGES + 1)]
    check_edges(star)
    with pytest.raises(ConfigError, match=f"rank 0 .* {MAX_EDGES + 1} directed pairs"):
        check_edges([*star, Edge(1, 0)])
