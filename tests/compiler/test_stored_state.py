"""State that no live rank holds: out of snapshots of lost ranks, else out of a saved version."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import MESHES, adaptation_findings, random_layout
from plan_cases import chunks_by_rank

from resihp.compiler.adaptation import Situation, adapt
from resihp.compiler.cluster import Health
from resihp.compiler.defaults import pricing_of_plan
from resihp.compiler.layout import initial_plan
from resihp.compiler.reconfigure import lines_to
from resihp.compiler.sources import State, Stored, require_state
from resihp.errors import NoFeasiblePlan
from resihp.ir.model import Batch, Load, Mesh, ModelShape, Plan, Reshard, Restore, Resume
from resihp.ir.reshard import loads, nothing_before, transfers

STEP = 12
SHAPE = ModelShape(name="tiny", layers=6, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=128)
HEALTHY = initial_plan(
    SHAPE,
    Mesh(tp=2, pp=2, dp=2),
    Batch(microbatches=4, tokens=32),
    schedule="1f1b",
    memory_bytes=None,
)


def resuming(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, resume=Resume(step=STEP))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(MESHES))
def test_each_chunk_comes_from_the_first_source_that_has_it(seed: int, mesh: Mesh):
    """A live rank, else a snapshot, else the saved version; the verifier finds nothing."""
    rng = random.Random(seed)
    num_layers = rng.randint(2 * mesh.pp + 1, 4 * mesh.pp + 2)
    previous = random_layout(rng, mesh, num_layers)
    lost = frozenset(rng.sample(range(mesh.world), rng.randint(0, mesh.world - mesh.pp)))
    alive = [rank for rank in range(mesh.world) if rank not in lost]
    snapshots = {
        rank: tuple(rng.sample(range(mesh.world), rng.randint(1, mesh.world)))
        for rank in lost
        if rng.random() < 0.6
    }
    new = resuming(random_layout(rng, mesh, num_layers, lost))
    state = State(previous, lost, Stored(snapshots=snapshots, has_checkpoint=True))
    lines = lines_to(state, new.groups, step=STEP, node_of=lambda rank: rank // 4)
    plan = msgspec.structs.replace(new, reconfigure=lines)
    assert adaptation_findings(plan, previous) == []
    before = chunks_by_rank(previous)

    def holders(layer: int, chunk: int, ranks: object) -> set[int]:
        assert isinstance(ranks, list | frozenset | set)
        return {rank for rank in ranks if chunk in before.get(rank, {}).get(layer, ())}

    readable = {rank for rank, readers in snapshots.items() if set(readers) & set(alive)}
    for move in transfers(previous, plan):
        if move.replicated:
            continue
        living = holders(move.layer, move.chunk, alive)
        if move.snapshot_of is None:
            assert move.source in living
        else:
            assert not living
            assert move.source in set(snapshots[move.snapshot_of]) & set(alive)
            assert move.snapshot_of in holders(move.layer, move.chunk, readable)
    for load in loads(previous, plan):
        if not load.replicated:
            assert not holders(load.layer, load.chunk, alive)
            assert not holders(load.layer, load.chunk, readable)


def adapted(previous: Plan, lost: set[int], stored: Stored) -> Plan:
    pricing = pricing_of_plan(previous, Health(lost=frozenset(lost)), None)
    return adapt(Situation(previous, pricing, resume_step=STEP, stored=stored)).plan


def test_both_peers_of_a_shard_are_gone_and_a_snapshot_of_one_is_left():
    """The rank that can read it is asked; without it there is no plan."""
    stored = Stored(snapshots={5: (4,)})
    plan = adapted(HEALTHY, {1, 5}, stored)
    restores = [line for line in plan.reconfigure if isinstance(line, Restore)]
    assert restores
    assert {(line.source, line.giver) for line in restores} == {(5, 4)}
    assert not any(isinstance(line, Load) for line in plan.reconfigure)
    with pytest.raises(NoFeasiblePlan, match="no live rank still holds chunk 1"):
        adapted(HEALTHY, {1, 5}, Stored(snapshots={5: (1,)}))  # its only reader is gone too
    with pytest.raises(NoFeasiblePlan):
        require_state(State(HEALTHY, {1, 5}))


def test_a_saved_version_gives_what_nothing_else_has():
    """Live ranks still give all that they hold."""
    plan = adapted(HEALTHY, {1, 5}, Stored(has_checkpoint=True))
    kinds = {type(line) for line in plan.reconfigure}
    assert Load in kinds
    read = [load for load in loads(HEALTHY, plan) if not load.replicated]
    assert {load.chunk for load in read} == {1}
    assert {load.step for load in read} == {STEP}


def test_where_live_ranks_hold_another_version_all_is_read():
    """Also by ranks whose group does not change; the plan follows one of empty hands."""
    plan = adapted(HEALTHY, {1, 5}, Stored(has_checkpoint=True, is_only_saved=True))
    assert {type(line) for line in plan.reconfigure} == {Load}
    empty = nothing_before(HEALTHY)
    assert transfers(empty, plan) == ()
    assert {load.target for load in loads(empty, plan)} == set(plan.active_ranks)
    assert Reshard not in {type(line) for line in plan.reconfigure}


@pytest.mark.parametrize("victims", [[0, 1, 4, 5], [2, 3, 6, 7], [5, 1, 3, 7, 2], [0, 4, 1, 5, 6]])
def test_ranks_may_be_lost_until_few_are_left(victims: list[int]):
    """One after the other, a stage of both replicas among them: snapshots fill in."""
    previous, lost = HEALTHY, set[int]()
    for victim in victims:
        lost.add(victim)
        alive = tuple(rank for rank in range(8) if rank not in lost)
        previous = adapted(previous, lost, Stored(snapshots=dict.fromkeys(lost, alive)))
        assert not lost.intersection(previous.active_ranks)
