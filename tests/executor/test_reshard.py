"""Resharding over real sockets: between any two layouts the new shards are the logical ones."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from cases import assert_same_bits
from layouts import SMALL, idle_plan, job_of, plan_of
from odd_model import ODD, logical, shards
from torch import Tensor

from resihp.compiler import initial_plan
from resihp.compiler.adapt import adapt
from resihp.errors import CommError, NoFeasiblePlan, PeerLost
from resihp.executor.adamw import AdamW
from resihp.executor.checksum import SUM_BYTES
from resihp.executor.device.interface import Tag
from resihp.executor.layouts import local_shape
from resihp.executor.reshard import MESSAGE_BYTES, NUM_ASKED, Resharding
from resihp.executor.state import Holding, holding_of, shard_hashes
from resihp.executor.stream import Event, ThreadStream
from resihp.executor.transport import Transport
from resihp.ir.expand import expand
from resihp.ir.model import Batch, Group, GroupName, LayerRange, Mesh, Move, Plan, Reshard
from resihp.ir.program import Program
from resihp.wire.address import Address

KEY = b"k" * 32
FAR_S = 30.0
MESH = Mesh(tp=4, pp=2, dp=2)
LAST = SMALL.num_hidden_layers - 1
STATE = tuple(logical(seed) for seed in range(3))
"""Logical parameters and both moments."""


def program_of(plan: Plan, rank: int) -> Program | None:
    return expand(plan, rank) if rank in plan.active_ranks else None


def held(plan: Plan, rank: int) -> Holding | None:
    """What a rank holds in a layout."""
    program = program_of(plan, rank)
    if program is None:
        return None
    parameters, mean, mean_sq = (shards(program, kind) for kind in STATE)
    optimizer = AdamW(job_of(MESH).optimizer, parameters, exp_avg=mean, exp_avg_sq=mean_sq)
    return holding_of(program, optimizer)


class CountingWire:
    """Counts the messages of state that a rank asks for."""

    def __init__(self, wire: Transport, part: Resharding) -> None:
        self._wire = wire
        self._part = part
        self._asked_bytes = 0
        self.sizes: list[int] = []
        self.most_open_bytes = 0
        """Asked for and not put in place, at most."""

    def send(
        self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
    ) -> Event:
        return self._wire.send(peer, tag, source, cut)

    def receive(self, peer: int, tag: Tag, num_bytes: int) -> Event:
        if tag.chunk == 0:
            self.sizes.append(num_bytes)
            self._asked_bytes += num_bytes - SUM_BYTES
            open_bytes = self._asked_bytes - self._part.received_bytes
            self.most_open_bytes = max(self.most_open_bytes, open_bytes)
        return self._wire.receive(peer, tag, num_bytes)


class Cluster:
    """Transports and streams of all ranks, in one loop; one generation after another."""

    def __init__(
        self, addresses: dict[int, Address], transports: list[Transport], message_bytes: int
    ) -> None:
        self._message_bytes = message_bytes
        self._addresses = addresses
        self._transports = transports
        self._streams = [ThreadStream(f"comm{rank}") for rank in addresses]
        self._generation = 0

    async def reshard(
        self, previous: Plan, plan: Plan, holdings: dict[int, Holding | None]
    ) -> tuple[dict[int, Holding | None], int]:
        """What each rank that is not lost holds afterwards, and the bytes that crossed."""
        self._generation += 1
        alive = [rank for rank in range(plan.mesh.world) if rank not in plan.lost]
        addresses = {rank: self._addresses[rank] for rank in alive}
        for rank in alive:
            self._transports[rank].begin(self._generation, KEY, addresses)
        parts = {
            rank: Resharding(
                ODD,
                job_of(plan.mesh),
                previous,
                plan,
                rank,
                message_bytes=self._message_bytes,
            )
            for rank in alive
        }
        self.wires = {rank: CountingWire(self._transports[rank], parts[rank]) for rank in alive}

        async def one(rank: int) -> Holding | None:
            transport = self._transports[rank]
            await transport.connect(parts[rank].peers)
            return await parts[rank].run(
                holdings[rank], program_of(plan, rank), self.wires[rank], self._streams[rank]
            )

        async with asyncio.timeout(FAR_S):
            results = await asyncio.gather(*map(one, alive))
        moved = sum(part.received_bytes for part in parts.values())
        return dict(zip(alive, results, strict=True)), moved


@asynccontextmanager
async def cluster_of(world: int, message_bytes: int = MESSAGE_BYTES) -> AsyncIterator[Cluster]:
    transports = [Transport("job", rank, timeout_s=FAR_S) for rank in range(world)]
    addresses = {rank: await transport.open() for rank, transport in enumerate(transports)}
    try:
        yield Cluster(addresses, transports, message_bytes)
    finally:
        for transport in transports:
            await transport.close()
        await asyncio.sleep(0)


def check(plan: Plan, holdings: dict[int, Holding | None]) -> None:
    """Everybody holds its slices of the logical state, to the bit, and says so by its hashes."""
    hashes: dict[str, str] = {}
    for rank, holding in holdings.items():
        expected = held(plan, rank)
        if expected is None or holding is None:
            assert holding is expected
            continue
        assert holding.program == expected.program
        for kind, wanted in zip(holding.kinds(), expected.kinds(), strict=True):
            assert not any(tensor.isnan().any() for tensor in kind.values())
            assert_same_bits(dict(kind), dict(wanted))
        for name, digest in shard_hashes(ODD, holding, plan.mesh.tp).items():
            assert hashes.setdefault(name, digest) == digest


# --- layouts as the compiler makes them


def healthy(mesh: Mesh) -> Plan:
    return initial_plan(
        SMALL.shape("small"),
        mesh,
        Batch(microbatches=2, tokens=64),
        schedule="1f1b",
        memory_bytes=2**30,
    )


def losses(mesh: Mesh, chosen: random.Random) -> list[Plan]:
    """The healthy plan and those after one random loss after another, while there is one."""
    plans = [healthy(mesh)]
    for _ in range(4):
        alive = sorted(set(range(mesh.world)) - set(plans[-1].lost))
        lost = chosen.sample(alive, min(len(alive), chosen.choice([1, 1, 2, 3])))
        try:
            plans.append(adapt(plans[-1], lost=lost, step=5).plan)
        except NoFeasiblePlan:
            break
    return plans


@pytest.mark.asyncio
@pytest.mark.parametrize("mesh", [(4, 1, 2), (2, 2, 2), (4, 2, 2), (2, 1, 3), (1, 2, 3)], ids=str)
async def test_every_recovery_leaves_the_logical_state(mesh: tuple[int, int, int]):
    """One failure after another, each from what the one before left."""
    shape = Mesh(tp=mesh[0], pp=mesh[1], dp=mesh[2])
    chosen = random.Random(0)
    async with cluster_of(shape.world) as cluster:
        for _ in range(5):
            plans = losses(shape, chosen)
            holdings = {rank: held(plans[0], rank) for rank in range(shape.world)}
            for previous, plan in pairwise(plans):
                holdings, _ = await cluster.reshard(previous, plan, holdings)
                check(plan, holdings)


# --- any layouts


def partition(chosen: random.Random) -> list[tuple[LayerRange, ...]]:
    """Layers of both positions: one stage each, or two, looped or in V shape."""
    num_stages = chosen.choice([2, 2, 4])
    cuts = sorted(chosen.sample(range(LAST), num_stages - 1))
    bounds = [-1, *cuts, LAST]
    stages = [LayerRange(first + 1, last) for first, last in pairwise(bounds)]
    if num_stages == 2:
        return [(stage,) for stage in stages]
    if chosen.random() < 0.5:
        return [(stages[0], stages[2]), (stages[1], stages[3])]
    return [(stages[0], stages[3]), (stages[1], stages[2])]


def groups_over(
    ranks: Sequence[int], chosen: random.Random, replicas: Sequence[int]
) -> list[Group]:
    """Groups of random degrees, from random members of `ranks` in random order."""
    layers = partition(chosen)
    left = chosen.sample(list(ranks), len(ranks))
    groups: list[Group] = []
    for replica in replicas:
        for pp in (0, 1):
            tp = chosen.choice([1, 2, 4])
            members, left = tuple(left[:tp]), left[tp:]
            groups.append(Group(replica=replica, pp=pp, ranks=members, layers=layers[pp]))
    return groups


def common(a: LayerRange, b: LayerRange) -> LayerRange | None:
    first, last = max(a.first, b.first), min(a.last, b.last)
    return LayerRange(first, last) if first <= last else None


def random_change(chosen: random.Random) -> tuple[Plan, Plan]:
    """Two unrelated layouts, and losses that leave one replica of each old stage whole."""
    world = range(MESH.world)
    previous = idle_plan(MESH, groups_over(world, chosen, [0, 1]))
    safe = [chosen.choice([0, 1]) for _ in (0, 1)]
    sources = [previous.group(safe[stage], stage) for stage in (0, 1)]
    needed = {rank for source in sources if source is not None for rank in source.ranks}
    may_die = sorted(set(world) - needed)
    lost = chosen.sample(may_die, min(len(may_die), chosen.randint(0, 5)))
    alive = [rank for rank in world if rank not in lost]
    groups = groups_over(alive, chosen, [chosen.choice([0, 1])] if len(alive) < 16 else [0, 1])
    active = {rank for group in groups for rank in group.ranks}
    reconfigure = [
        Reshard(layers=layers, source=source.name, target=group.name)
        for group in groups
        for source in sources
        if source is not None
        for held in source.layers
        for needed in group.layers
        if (layers := common(held, needed)) is not None
    ]
    standby = sorted(set(alive) - active)
    plan = idle_plan(MESH, groups, reconfigure=reconfigure, lost=sorted(lost), standby=standby)
    return previous, plan


@pytest.mark.asyncio
async def test_any_layout_follows_from_any_other():
    """Degrees grow and shrink, layers change stages, members change seats, some are lost."""
    chosen = random.Random(1)
    standby_gave = newcomer_got = kept = 0
    async with cluster_of(MESH.world, message_bytes=200) as cluster:
        for _ in range(30):
            previous, plan = random_change(chosen)
            holdings = {rank: held(previous, rank) for rank in range(MESH.world)}
            before = {
                rank: {name: tensor.clone() for name, tensor in holding.parameters.items()}
                for rank, holding in holdings.items()
                if holding is not None
            }
            after, moved = await cluster.reshard(previous, plan, holdings)
            check(plan, after)
            for rank, tensors in before.items():
                holding = holdings[rank]
                assert holding is not None
                assert_same_bits(holding.parameters, tensors)
            moves = Resharding(ODD, job_of(MESH), previous, plan, 0).moves
            assert (moved > 0) == bool(moves)
            assert not {move.source for move in moves} & set(plan.lost)
            standby_gave += any(move.source in plan.standby for move in moves)
            newcomer_got += any(previous.group_of(move.target) is None for move in moves)
            kept += len({move.target for move in moves}) < len(plan.active_ranks)
    assert standby_gave
    assert newcomer_got
    assert kept


# --- details


def two_groups(ranks: Sequence[Sequence[int]], reshard: bool = False) -> Plan:
    """One stage, two replicas, TP 2."""
    mesh = Mesh(tp=2, pp=1, dp=2)
    layers = LayerRange(0, LAST)
    groups = [
        Group(replica=replica, pp=0, ranks=tuple(members), layers=(layers,))
        for replica, members in enumerate(ranks)
    ]
    reconfigure = [Reshard(layers=layers, source=GroupName(0, 0), target=GroupName(1, 0))]
    return plan_of(mesh, groups, reconfigure=reconfigure if reshard else (), lost=())


@pytest.mark.asyncio
async def test_a_rank_that_keeps_its_place_moves_nothing():
    """Not even a copy: its tensors are the same ones."""
    plan = two_groups([[0, 1], [2, 3]])
    async with cluster_of(4) as cluster:
        holdings = {rank: held(plan, rank) for rank in range(4)}
        after, moved = await cluster.reshard(plan, plan, holdings)
    assert moved == 0
    for rank in range(4):
        old, new = holdings[rank], after[rank]
        assert old is not None
        assert new is not None
        assert all(new.parameters[name] is tensor for name, tensor in old.parameters.items())


@pytest.mark.asyncio
async def test_only_what_is_missing_moves():
    """A group of two that becomes one needs the other half of what is cut, and nothing else."""
    previous = two_groups([[0, 1], [2, 3]])
    plan = msgspec.structs.replace(two_groups([[0, 1], [2]], reshard=True), lost=(3,))
    async with cluster_of(4) as cluster:
        after, moved = await cluster.reshard(
            previous, plan, {rank: held(previous, rank) for rank in range(4)}
        )
    check(plan, after)
    layouts = [ODD.layout(name) for name in ODD.tensors(0, LAST)]
    missing = sum(math.prod(local_shape(each, 2, 1)) for each in layouts if each.dim is not None)
    assert moved == 3 * 4 * missing


@pytest.mark.asyncio
async def test_messages_of_state_are_small_and_few_at_a_time():
    """So that a layer of any size moves in bounded memory."""
    previous = two_groups([[0, 1], [2, 3]])
    plan = msgspec.structs.replace(two_groups([[0, 1], [2]], reshard=True), lost=(3,))
    async with cluster_of(4, message_bytes=64) as cluster:
        after, moved = await cluster.reshard(
            previous, plan, {rank: held(previous, rank) for rank in range(4)}
        )
        wire = cluster.wires[2]
    check(plan, after)
    assert sum(wire.sizes) - SUM_BYTES * len(wire.sizes) == moved > 10 * NUM_ASKED * 64
    assert max(wire.sizes) <= 64
    assert wire.most_open_bytes <= NUM_ASKED * 64


@pytest.mark.asyncio
async def test_in_bf16_what_moves_is_fp32():
    """Parameters keep all their bits; copies of them are made where they arrive."""
    bf16 = {"precision": "bf16"}
    previous = msgspec.structs.replace(two_groups([[0, 1], [2, 3]]), **bf16)
    changed = two_groups([[0, 1], [2]], reshard=True)
    plan = msgspec.structs.replace(changed, lost=(3,), **bf16)
    async with cluster_of(4) as cluster:
        after, _ = await cluster.reshard(
            previous, plan, {rank: held(previous, rank) for rank in range(4)}
        )
    check(plan, after)
    for holding in after.values():
        assert holding is not None
        rounded = {name: p.to(torch.bfloat16) for name, p in holding.parameters.items()}
        assert_same_bits(holding.working, rounded)


@pytest.mark.asyncio
async def test_a_spare_takes_over_a_whole_seat():
    """`move` hands on what one rank held, though a peer of equal state is nearer by."""
    previous = two_groups([[0, 1], [2]])
    line = Move(layers=LayerRange(0, LAST), source=1, target=3)
    plan = msgspec.structs.replace(two_groups([[0, 3], [2]]), reconfigure=(line,), standby=(1,))
    async with cluster_of(4) as cluster:
        after, _ = await cluster.reshard(
            previous, plan, {rank: held(previous, rank) for rank in range(4)}
        )
    check(plan, after)
    moves = Resharding(ODD, job_of(plan.mesh), previous, plan, 0).moves
    assert {(move.source, move.target) for move in moves} == {(1, 3)}


async def receive_alone(payload: Tensor | None) -> Exception:
    """Rank 2 of the plan above waits for its pieces; all that comes is `payload`, or the end."""
    previous = two_groups([[0, 1], [2, 3]])
    plan = msgspec.structs.replace(two_groups([[0, 1], [2]], reshard=True), lost=(3,))
    source, target = (Transport("job", rank, timeout_s=FAR_S) for rank in (1, 2))
    addresses = {1: await source.open(), 2: await target.open()}
    for transport in (source, target):
        transport.begin(1, KEY, addresses)
    await source.connect({2})
    await target.connect({1})
    resharding = Resharding(ODD, job_of(plan.mesh), previous, plan, 2)
    running = asyncio.create_task(
        resharding.run(held(previous, 2), expand(plan, 2), target, ThreadStream("comm"))
    )
    if payload is None:
        source.end()
    else:
        made = Event()
        made.set(payload)
        for number in range(len(resharding.moves)):
            source.send(2, Tag(255, number, 0, 0, 0, 0), made)
    try:
        async with asyncio.timeout(FAR_S):
            (error,) = await asyncio.gather(running, return_exceptions=True)
    finally:
        await source.close()
        await target.close()
        await asyncio.sleep(0)
    assert isinstance(error, ExceptionGroup)
    (cause,) = error.exceptions
    return cause


@pytest.mark.asyncio
async def test_a_piece_of_a_wrong_size_is_refused():
    """Rather than read as something else."""
    error = await receive_alone(torch.ones(3))
    assert isinstance(error, CommError)
    assert "12 bytes came, not " in str(error)


@pytest.mark.asyncio
async def test_the_death_of_a_source_ends_the_resharding():
    """At once; what to do then is for the coordinator to say."""
    assert isinstance(await receive_alone(None), PeerLost)
