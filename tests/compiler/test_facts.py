"""Sizes against what the executor really keeps: shapes, live storages, sums of gradients."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import plan_of
from schedule_cases import random_schedule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from resihp.compiler import facts_of, initial_plan
from resihp.compiler.facts import move_bytes, num_parameters, peak_partials, stage_facts
from resihp.compiler.models import MODELS
from resihp.config import BatchConfig, JobConfig, JobSection, ModelConfig
from resihp.executor.gradients import GradientTree
from resihp.executor.init import initial_parameters
from resihp.executor.layouts import local_shape
from resihp.executor.model import StageOptions
from resihp.executor.models import build_model
from resihp.executor.packing import MicroBatch as Tokens
from resihp.executor.state import initial_holding
from resihp.ir.expand import expand
from resihp.ir.model import Batch, GroupName, LayerRange, Mesh, MicroBatch, Op
from resihp.ir.placement import placement_of
from resihp.ir.reshard import ShardMove

CONFIG = ModelConfig(
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=56,
    vocab_size=272,
)
MODEL = build_model(CONFIG)
SHAPE = CONFIG.shape("tiny")
NUM_TOKENS = 64
RANGES = [LayerRange(0, 3), LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 3)]
in_ranges = pytest.mark.parametrize("layers", RANGES, ids=str)


class Storages(TorchDispatchMode):
    """Bytes of what was made while it is active and somebody still holds (views make nothing)."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                ref = StorageWeakRef(made.untyped_storage())
                self._made[ref.cdata] = (ref, made.untyped_storage().nbytes())
        return result

    @property
    def num_bytes(self) -> int:
        return sum(size for ref, size in self._made.values() if not ref.expired())


def packed(num_segments: int) -> Tokens:
    """A window of documents of equal length."""
    length = NUM_TOKENS // num_segments
    return Tokens(
        sample_id=0,
        num_targets=NUM_TOKENS,
        input_ids_T=torch.arange(NUM_TOKENS),
        targets_T=torch.arange(NUM_TOKENS),
        position_ids_T=torch.arange(NUM_TOKENS) % length,
        cu_seqlens=tuple(range(0, NUM_TOKENS + 1, length)),
    )


@in_ranges
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_parameters_are_those_of_the_executor(layers, tp):
    """The sum over the executor's own local shapes, at TP 4 with copies of both KV heads."""
    shapes = [local_shape(MODEL.layout(name), tp, 0) for name in MODEL.tensors(*layers)]
    assert num_parameters(SHAPE, layers, tp) == sum(map(math.prod, shapes))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_state_is_what_a_rank_holds_and_two_gradients(precision, tp):
    """Parameters, in bf16 both copies, and moments; beside them the sum and the reduced one."""
    mesh, batch = Mesh(tp=tp, pp=2, dp=1), Batch(microbatches=1, tokens=NUM_TOKENS)
    plan = initial_plan(SHAPE, mesh, batch, precision=precision)
    job = JobConfig(
        job=JobSection(steps=1),
        model=CONFIG,
        batch=BatchConfig(microbatches=1, tokens=NUM_TOKENS),
    )
    for group in plan.groups:
        holding = initial_holding(MODEL, job, expand(plan, group.ranks[0]))
        kept = (*holding.kinds(), holding.working)
        storages = {t.untyped_storage() for kind in kept for t in kind.values()}
        held = sum(storage.nbytes() for storage in storages)
        gradients = 2 * 4 * sum(t.numel() for t in holding.parameters.values())
        (facts,) = facts_of(plan).stages[group.name]
        assert facts.state_bytes == held + gradients


@given(st.sampled_from([1, 2, 4, 8]), st.integers(8, 99), st.integers(258, 299))
def test_of_near_equal_shards_the_longest_counts(tp, ffn, vocab):
    """Columns and rows that do not divide: no member has more, tensor by tensor."""
    config = msgspec.structs.replace(
        CONFIG, num_attention_heads=8, intermediate_size=ffn, vocab_size=vocab
    )
    model, shape, layers = build_model(config), config.shape("uneven"), LayerRange(0, 3)
    longest = sum(
        max(math.prod(local_shape(model.layout(name), tp, index)) for index in range(tp))
        for name in model.tensors(*layers)
    )
    assert num_parameters(shape, layers, tp) == longest


@pytest.mark.parametrize("layer", range(CONFIG.num_hidden_layers))
@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_a_move_has_the_bytes_of_the_tensors_that_it_carries(layer, num_chunks):
    """Parameters and both moments: a chunk of each tensor that is cut, or all whole ones."""
    layouts = [MODEL.layout(name) for name in MODEL.tensors(layer, layer)]
    whole = ShardMove(layer=layer, chunk=0, num_chunks=1, source=0, target=1, replicated=True)
    norms = sum(math.prod(layout.shape) for layout in layouts if layout.dim is None)
    assert move_bytes(SHAPE, whole) == norms * 3 * 4
    for chunk in range(num_chunks):
        move = ShardMove(layer=layer, chunk=chunk, num_chunks=num_chunks, source=0, target=1)
        cut = sum(
            math.prod(local_shape(layout, num_chunks, chunk))
            for layout in layouts
            if layout.dim is not None
        )
        assert move_bytes(SHAPE, move) == cut * 3 * 4


class Member:
    """One member of a TP group whose others are silent: it keeps what it would keep with them."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.index = 0

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """Nobody adds anything."""


@in_ranges
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_activations_are_those_that_a_real_stage_keeps(layers, tp, precision, recomputes):
    """After F and after B of packed documents, to a few scalars."""
    batch = Batch(microbatches=1, tokens=NUM_TOKENS)
    facts = stage_facts(SHAPE, batch, layers, tp, 1, precision, recomputes=recomputes)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    initial = initial_parameters(MODEL, MODEL.tensors(*layers), seed=1, degree=tp, index=0)
    parameters = {name: tensor.to(dtype) for name, tensor in initial.items()}
    options = StageOptions(recompute=recomputes)
    stage = MODEL.stage(layers.first, layers.last, Member(tp), parameters, options)
    tokens = packed(num_segments=4)

    def boundary():
        return torch.randn(NUM_TOKENS, CONFIG.hidden_size).to(dtype)

    with Storages() as storages:
        x_TD = None if stage.has_embedding else boundary()
        stage.forward((0, 0), tokens, x_TD, loss_scale=1.0)
        del x_TD
        after_f = storages.num_bytes
        dy_TD = None if stage.has_head else boundary()
        stage.backward_input((0, 0), dy_TD)
        del dy_TD
        after_b = storages.num_bytes
    left_by_b = facts.activation_bytes - facts.released_by_b_bytes + facts.weight_input_grad_bytes
    assert after_f == pytest.approx(facts.activation_bytes, abs=16)
    assert after_b == pytest.approx(left_by_b, abs=16)


@given(st.integers(1, 3), st.integers(1, 9), st.randoms())
def test_sums_alive_are_those_of_the_executors_tree(num_replicas, num_microbatches, random):
    """In any order of W the most partial sums alive are what the real tree holds."""
    done = [MicroBatch(h, n) for h in range(num_replicas) for n in range(num_microbatches)]
    random.shuffle(done)
    done = done[: random.randint(1, len(done))]
    tree, peak = GradientTree(num_replicas, num_microbatches), 0
    for home, number in done:
        peak = max(peak, tree.num_partials + 1)
        tree.add(home, number, {"w": torch.zeros(1)})
    assert peak_partials(done, num_microbatches) == peak


@given(st.integers(1, 200))
def test_in_order_the_sums_grow_with_the_logarithm(num_microbatches):
    """At most log2 of the micro-batches and one."""
    done = [MicroBatch(0, number) for number in range(num_microbatches)]
    assert peak_partials(done, num_microbatches) <= math.ceil(math.log2(num_microbatches)) + 1


def test_halving_the_degree_nearly_doubles_the_state():
    """Whole tables and norms aside."""
    batch = Batch(microbatches=1, tokens=8)
    whole, half = (stage_facts(SHAPE, batch, LayerRange(1, 2), tp, 2) for tp in (1, 2))
    assert 1.9 < whole.state_bytes / half.state_bytes <= 2.0
    assert whole.boundary_bytes == half.boundary_bytes == 8 * 48 * 4


def test_half_precision_keeps_22_bytes_a_parameter_and_half_of_most_activations():
    """fp32 master copy, moments, reduced gradient and one sum; what crosses stages is halved."""
    batch, layers = Batch(microbatches=8, tokens=NUM_TOKENS), LayerRange(1, 2)
    full, half = (stage_facts(SHAPE, batch, layers, 1, 4, p) for p in ("fp32", "bf16"))
    assert half.state_bytes == 22 * num_parameters(SHAPE, layers, 1)
    assert full.state_bytes == 32 * num_parameters(SHAPE, layers, 1)
    assert half.boundary_bytes * 2 == full.boundary_bytes
    assert half.weight_input_grad_bytes * 2 == full.weight_input_grad_bytes
    assert 0.5 < half.activation_bytes / full.activation_bytes < 0.52


@pytest.mark.parametrize(("tp", "fits"), [(4, True), (2, True), (1, False)])
def test_a_70b_model_on_16_stages_needs_two_80_gib_devices_a_stage(tp, fits):
    """Micro-batches of 2,048 tokens, five layers a stage, as many in flight as there are stages.

    At TP 4 a device has about 20 GB of state, as mixed precision is reckoned elsewhere too.
    """
    model, batch = MODELS["llama2-70b"].shape, Batch(microbatches=16, tokens=2048)
    facts = stage_facts(model, batch, LayerRange(5, 9), tp, 1, "bf16")
    needed = facts.state_bytes + 16 * facts.activation_bytes
    assert (needed <= 80 << 30) == fits
    if tp == 4:
        assert facts.state_bytes == pytest.approx(20e9, rel=0.2)


def test_every_group_has_its_sizes():
    """The first and last stages are not those of the middle."""
    sizes = facts_of(plan_of(pp=3)).stages
    assert set(sizes) == {GroupName(r, s) for r in range(2) for s in range(3)}
    first, middle, last = (sizes[GroupName(0, stage)][0] for stage in range(3))
    assert first.state_bytes > middle.state_bytes
    assert last.activation_bytes > middle.activation_bytes


def test_each_stage_of_a_group_has_its_own_sizes():
    """In V shape position 0 has the embedding in one stage, and the head in another."""
    plan = plan_of(pp=2, schedule="zbv")
    sizes = facts_of(plan).stages
    first, last = sizes[GroupName(0, 0)]
    assert last.activation_bytes > first.activation_bytes
    assert all(len(sizes[group.name]) == len(group.layers) == 2 for group in plan.groups)


@given(st.integers(0, 10**9))
def test_sums_are_counted_stage_by_stage(seed):
    """The order of W of one stage says nothing about the sums of another."""
    schedule = random_schedule(seed)
    placement, batch = placement_of(schedule), schedule.batch
    sizes = facts_of(schedule).stages
    for stream in schedule.streams:
        (replica,) = stream.replicas
        group = schedule.group(replica, stream.pp)
        assert group is not None
        for at, stage in enumerate(placement.stages[stream.pp]):
            done = [
                MicroBatch(replica if i.home is None else i.home, i.microbatch or 0)
                for i in stream.body
                if i.op in (Op.W, Op.BW) and placement.stage_of(stream.pp, i) == stage
            ]
            num_sums = peak_partials(done, batch.microbatches)
            expected = stage_facts(
                schedule.model,
                batch,
                group.layers[at],
                group.tp,
                num_sums,
                recomputes=stage in schedule.recompute,
            )
            assert sizes[group.name][at] == expected
