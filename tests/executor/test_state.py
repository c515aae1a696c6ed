"""The transaction around a step: whoever was where, all end in the same state."""

from __future__ import annotations

import msgspec
import pytest
import torch
from cases import assert_same_bits
from layouts import MODEL, SMALL, idle_plan, job_of, logical_tensors, one_stage, shards_of
from odd_model import ODD, logical, shards

from resihp.errors import CommError
from resihp.executor.adamw import AdamW
from resihp.executor.held import Held, Loss, SumSet
from resihp.executor.layouts import local_shard
from resihp.executor.state import (
    Holding,
    TrainState,
    clip_scale,
    holding_of,
    initial_holding,
    shard_hashes,
)
from resihp.ir.expand import expand
from resihp.ir.model import Group, LayerRange, Mesh, Plan
from resihp.ir.program import Program
from resihp.wire.messages import Commit, StepRecord

PLAN = one_stage({0: 2, 1: 2}, 2, 2)
PROGRAM = expand(PLAN, 1)
JOB = job_of(PLAN.mesh)


def running(program: Program = PROGRAM) -> TrainState:
    """A rank in generation 1, before its first step."""
    state = TrainState(JOB)
    state.adopt(0, Commit(version=0, updates=0, record=None))
    state.prepare(1, initial_holding(MODEL, JOB, program))
    state.go()
    return state


def gradient(step: int, program: Program = PROGRAM) -> dict[str, torch.Tensor]:
    return shards_of(program, logical_tensors(500 + step))


def record_of(
    state: TrainState, step: int, *, norm: float = 40.0, skipped: bool = False, gap: int = 1
) -> StepRecord:
    return StepRecord(
        step=step,
        loss=2.0,
        grad_norm=norm,
        learning_rate=state.learning_rate(step),
        skipped=skipped,
        num_tokens=256,
        samples=(step,),
        duration_s=0.1,
        snapshot=state.is_snapshot_due(gap),
    )


def commit_of(state: TrainState) -> Commit:
    """What the coordinator makes of a rank that completed its step."""
    return Commit(version=state.version, updates=state.updates, record=state.record)


def do_step(
    state: TrainState, *, skipped: bool = False, until: str = "applied", gap: int = 1
) -> None:
    """The next step, or the beginning of it: until it is reduced, voted or applied.

    `gap`: what all agreed on, of the steps between two snapshots.
    """
    step = state.version
    state.reduce_complete(gradient(step))
    if until == "reduced":
        return
    state.vote_complete(record_of(state, step, skipped=skipped, gap=gap))
    if until == "applied":
        state.apply()


def tensors_of(state: TrainState) -> dict[str, torch.Tensor]:
    """Parameters and moments."""
    assert state.current is not None
    return {
        f"{kind}.{name}": tensor
        for kind, tensors in zip("pms", state.current.kinds(), strict=True)
        for name, tensor in tensors.items()
    }


def copies(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors_of(state).items()}


# --- one step


def test_a_step_is_an_update_with_clipped_gradients():
    """By the norm and the learning rate of the record, which all ranks share."""
    state = running()
    do_step(state)
    parameters = initial_holding(MODEL, JOB, PROGRAM).parameters
    oracle = AdamW(JOB.optimizer, parameters)
    scale = JOB.optimizer.grad_clip / (40.0 + 1e-6)
    oracle.step(gradient(0), state.learning_rate(0), scale)
    assert state.current is not None
    assert_same_bits(state.current.parameters, oracle.parameters)
    assert (state.version, state.voted, state.updates) == (1, 1, 1)


def test_small_gradients_are_not_scaled():
    """Clipping only ever shrinks."""
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(0.0, 1.0) == 1.0
    assert clip_scale(4.0, 1.0) == pytest.approx(0.25)


def test_a_skipped_step_is_a_version_without_an_update():
    """Nothing changes but the count, on every rank alike."""
    state = running()
    before = copies(state)
    do_step(state, skipped=True)
    assert_same_bits(tensors_of(state), before)
    assert (state.version, state.updates) == (1, 0)


def test_steps_out_of_order_are_bugs():
    """No vote without gradients before it, no update without a vote, no step on top of another."""
    state = running()
    with pytest.raises(AssertionError):
        state.apply()
    with pytest.raises(AssertionError):
        state.vote_complete(record_of(state, 1))
    do_step(state, until="voted")
    with pytest.raises(AssertionError, match="before the last one was applied"):
        state.reduce_complete(gradient(1))


# --- settling after a failure


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("until", ["reduced", "voted", "applied"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_whoever_is_behind_rolls_forward_to_the_same_bits(
    steps_before: int, until: str, skipped: bool
):
    """Before the vote, before the update, or after it: the commit makes them equal."""
    ahead, behind = running(), running()
    for _ in range(steps_before):
        do_step(ahead)
        do_step(behind)
    do_step(ahead, skipped=skipped)
    do_step(behind, skipped=skipped, until=until)
    for state in (ahead, behind):
        state.adopt(1, commit_of(ahead))
    assert_same_bits(tensors_of(behind), tensors_of(ahead))
    for state in (ahead, behind):
        assert (state.version, state.voted) == (steps_before + 1, steps_before + 1)
        assert state.updates == steps_before + (not skipped)
        assert state.record == ahead.record


@pytest.mark.parametrize("until", ["reduced", "nothing"])
def test_an_interrupted_step_that_nobody_voted_is_forgotten(until: str):
    """[T17] It is redone in the next generation, from the version before it."""
    state = running()
    do_step(state)
    before = copies(state)
    if until == "reduced":
        do_step(state, until="reduced")
    state.adopt(1, commit_of(state))
    state.prepare(2, state.current)
    state.go()
    assert_same_bits(tensors_of(state), before)
    assert state.reduced is None
    assert (state.version, state.voted, state.layout) == (1, 1, 2)
    do_step(state)
    assert state.version == 2


def test_a_rank_cannot_be_asked_for_what_it_never_had():
    """Two steps ahead, back, or forward without gradients: bugs of the coordinator."""
    state = running()
    record = record_of(state, 0)
    with pytest.raises(AssertionError, match="without gradients"):
        state.adopt(1, Commit(version=1, updates=1, record=record))
    do_step(state)
    with pytest.raises(AssertionError):
        state.adopt(1, Commit(version=3, updates=3, record=record))
    with pytest.raises(CommError, match="no snapshot of version 0"):
        state.adopt(1, Commit(version=0, updates=0, record=None))
    with pytest.raises(AssertionError, match="no layout of generation 7"):
        state.adopt(7, commit_of(state))


def test_a_settlement_may_be_repeated():
    """A second loss while the next generation opens deploys again from the same layout."""
    state, ahead = running(), running()
    do_step(ahead)
    do_step(state, until="reduced")
    for generation in (2, 3):
        state.adopt(1, commit_of(ahead))
        state.prepare(generation, holding_of(PROGRAM, AdamW(JOB.optimizer, gradient(9))))
    assert_same_bits(tensors_of(state), tensors_of(ahead))
    assert state.layouts == (1, 3)


def test_a_prepared_layout_is_used_only_after_go():
    """Until then the old one is what others may still need."""
    state = running()
    old = state.current
    new = holding_of(PROGRAM, AdamW(JOB.optimizer, gradient(9)))
    state.prepare(2, new)
    assert (state.layout, state.current) == (1, old)
    assert state.layouts == (1, 2)
    state.go()
    assert (state.layout, state.current) == (2, new)
    assert state.layouts == (2,)


@pytest.mark.parametrize("base", [1, 2])
def test_a_prepared_layout_is_promoted_or_discarded_as_the_others_say(base: int):
    """Whether all joined is known to the coordinator only: its base decides."""
    state = running()
    old, new = state.current, holding_of(PROGRAM, AdamW(JOB.optimizer, gradient(9)))
    state.prepare(2, new)
    state.adopt(base, commit_of(state))
    assert state.current is (new if base == 2 else old)
    assert state.layouts == (base,)


HELD = Held(0, {0: [SumSet(frozenset({(0, 0), (1, 1)}), {})]}, {})


def test_sums_of_an_interrupted_iteration_are_told_with_their_layout():
    """Also while another one is prepared, which they do not fit."""
    state = running()
    assert state.report_held() == (-1, 1, ())
    state.held = HELD
    state.prepare(2, holding_of(PROGRAM, AdamW(JOB.optimizer, gradient(9))))
    step, layout, (sums,) = state.report_held()
    assert (step, layout, sums.sets) == (0, 1, ((0, JOB.batch.microbatches + 1),))


@pytest.mark.parametrize("base", [1, 2])
def test_sums_of_another_layout_are_dropped(base: int):
    """[T17] Who takes over what was prepared lets the sums of the layout before go."""
    state = running()
    state.held = HELD
    state.prepare(2, holding_of(PROGRAM, AdamW(JOB.optimizer, gradient(9))))
    state.adopt(base, commit_of(state))
    assert state.held == (HELD if base == 1 else None)


@pytest.mark.parametrize("kept", [None, HELD])
def test_from_go_on_there_is_what_is_kept_and_nothing_else(kept: Held | None):
    """[T17] Should the next loss come before the interpreter is made, it is not the old sums."""
    state = running()
    state.held = HELD._replace(losses={(0, 0): Loss(1.0, 7)})
    state.prepare(2, holding_of(PROGRAM, AdamW(JOB.optimizer, gradient(9))))
    state.go(kept)
    assert state.held == kept
    assert state.report_held()[:2] == (-1 if kept is None else 0, 2)


# --- standby


def test_a_standby_rank_takes_over_the_numbers():
    """It holds nothing, so there is nothing to roll forward."""
    state = TrainState(JOB)
    record = record_of(state, 6)
    state.adopt(3, Commit(version=7, updates=5, record=record))
    assert (state.version, state.voted, state.updates, state.record) == (7, 7, 5, record)
    state.prepare(4, None)
    state.go()
    assert (state.layout, state.current) == (4, None)


def test_a_rank_that_is_parked_lets_go_of_its_shards():
    """At go, since until then others may need them."""
    state = running()
    do_step(state)
    state.adopt(1, commit_of(state))
    state.prepare(2, None)
    assert state.current is not None
    state.go()
    assert state.current is None


def test_a_standby_rank_that_comes_in_updates_like_the_others():
    """Bias correction depends on the number of updates, which it did not do itself."""
    veteran, newcomer = running(), TrainState(JOB)
    for skipped in (False, True, False):
        do_step(veteran, skipped=skipped)
    commit = commit_of(veteran)
    newcomer.adopt(1, commit)
    veteran.adopt(1, commit)
    assert veteran.current is not None
    parameters, mean, mean_sq = (
        {name: tensor.clone() for name, tensor in kind.items()} for kind in veteran.current.kinds()
    )
    received = AdamW(JOB.optimizer, parameters, exp_avg=mean, exp_avg_sq=mean_sq)
    newcomer.prepare(2, holding_of(PROGRAM, received))
    veteran.prepare(2, veteran.current)
    for state in (veteran, newcomer):
        state.go()
        do_step(state)
    assert_same_bits(tensors_of(newcomer), tensors_of(veteran))


# --- the beginning, and hashes


@pytest.mark.parametrize(
    "plan", [PLAN, one_stage({0: 1}, 1, 2), one_stage({0: 4}, 1, 2)], ids="212"
)
def test_every_layout_starts_from_the_same_model(plan: Plan):
    """Each rank has its shards of it, and moments of zero."""
    for rank in plan.active_ranks:
        program = expand(plan, rank)
        holding = initial_holding(MODEL, job_of(plan.mesh), program)
        for name, shard in holding.parameters.items():
            whole = MODEL.initial(name, JOB.job.seed)
            assert torch.equal(
                shard, local_shard(MODEL.layout(name), whole, program.tp, program.tp_index)
            )
        assert not any(t.any() for kind in holding.kinds()[1:] for t in kind.values())


def held(plan: Plan, rank: int, seed: int = 0) -> Holding:
    """Shards of three random logical states."""
    program = expand(plan, rank)
    parameters, mean, mean_sq = (
        shards_of(program, logical_tensors(10 * seed + kind)) for kind in range(3)
    )
    return holding_of(program, AdamW(JOB.optimizer, parameters, exp_avg=mean, exp_avg_sq=mean_sq))


def test_hashes_are_the_same_in_every_layout():
    """A shard has one name and one digest, however many of them a rank holds."""
    seen: dict[str, str] = {}
    for degrees in ({0: 1}, {0: 2}, {0: 4}, {0: 4, 1: 1, 2: 2}):
        plan = one_stage(degrees, len(degrees), 2)
        names: set[str] = set()
        for rank in plan.active_ranks:
            for name, digest in shard_hashes(MODEL, held(plan, rank), 4).items():
                assert seen.setdefault(name, digest) == digest, name
                names.add(name)
        assert names == set(seen), "some layout misses a shard"
    assert len(seen) == SMALL.num_hidden_layers * 5
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize("kind", range(3))
def test_one_bit_of_difference_changes_the_hash_of_its_shard_only(kind: int):
    """Of parameters or of either moment."""
    plan = one_stage({0: 2}, 1, 2)
    same, other = held(plan, 1), held(plan, 1)
    tensor = other.kinds()[kind]["model.layers.2.self_attn.o_proj.weight"]
    bits = tensor.view(torch.int32)
    bits[3, 0] ^= 1
    before, after = (shard_hashes(MODEL, holding, 4) for holding in (same, other))
    assert {name for name in before if before[name] != after[name]} == {"layer 2 shard 2/4"}


def test_the_learning_rate_is_a_function_of_the_step_only():
    """Not of updates, ranks or generations."""
    job = msgspec.structs.replace(
        JOB, optimizer=msgspec.structs.replace(JOB.optimizer, lr=1.0, warmup_steps=4)
    )
    state = TrainState(job)
    assert [state.learning_rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert state.learning_rate(9) == pytest.approx(0.1)


# --- several stages, and bf16


def test_a_rank_of_several_stages_holds_all_of_their_tensors():
    """In V shape; its hashes are those of ranks that hold one stage each."""
    first, second = LayerRange(0, 0), LayerRange(3, 3)
    mesh = Mesh(tp=4, pp=2, dp=1)
    vee = idle_plan(
        mesh,
        [
            Group(replica=0, pp=0, ranks=(0, 1), layers=(first, second)),
            Group(replica=0, pp=1, ranks=(2,), layers=(LayerRange(1, 1), LayerRange(2, 2))),
        ],
    )
    whole = idle_plan(
        Mesh(tp=4, pp=1, dp=1),
        [Group(replica=0, pp=0, ranks=(0, 1, 2, 3), layers=(LayerRange(0, 3),))],
    )
    state = [logical(kind) for kind in range(3)]

    def hashes_of(plan: Plan) -> dict[str, str]:
        found: dict[str, str] = {}
        for rank in plan.active_ranks:
            program = expand(plan, rank)
            parameters, mean, mean_sq = (shards(program, kind) for kind in state)
            optimizer = AdamW(JOB.optimizer, parameters, exp_avg=mean, exp_avg_sq=mean_sq)
            for name, digest in shard_hashes(ODD, holding_of(program, optimizer), 4).items():
                assert found.setdefault(name, digest) == digest, name
        return found

    assert hashes_of(vee) == hashes_of(whole)
    names = set(initial_holding(ODD, JOB, expand(vee, 0)).parameters)
    assert names == {*ODD.tensors(0, 0), *ODD.tensors(3, 3)}


def in_bf16(program: Program) -> Program:
    return msgspec.structs.replace(program, precision="bf16")


def test_in_bf16_stages_read_rounded_copies_of_fp32_parameters():
    """The copies follow the parameters at each step, and are the same tensors for good."""
    single, state = running(), running(in_bf16(PROGRAM))
    assert state.current is not None
    before = dict(state.current.working)
    for _ in range(3):
        do_step(single)
        do_step(state)
    assert_same_bits(tensors_of(state), tensors_of(single))
    for name, copy in state.current.working.items():
        assert copy is before[name]
        assert copy.dtype == torch.bfloat16
        assert torch.equal(copy, state.current.parameters[name].to(torch.bfloat16))


def test_in_bf16_small_updates_are_not_lost():
    """A thousandth of a parameter's last bf16 bit, a thousand times."""
    state = running(in_bf16(PROGRAM))
    assert state.current is not None
    name = next(name for name in state.current.parameters if name.endswith("norm.weight"))
    for _ in range(1000):
        state.current.parameters[name].sub_(2.0**-8 / 1000)
        state.current.refresh()
    assert (state.current.working[name] < 1.0).all()


def test_in_fp32_stages_read_the_parameters_themselves():
    """No copy is kept."""
    state = running()
    assert state.current is not None
    for name, tensor in state.current.working.items():
        assert tensor is state.current.parameters[name]
