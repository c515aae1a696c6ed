"""The healthy plan of given degrees: layers split by cost within memory; choices that cannot be."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from plan_cases import findings

from resihp.cli import main
from resihp.compiler.capacity import peak_bytes
from resihp.compiler.cluster import CLUSTERS, Health
from resihp.compiler.costs import CostModel, Lengths
from resihp.compiler.healthy import Recipe, degrees_of, healthy_plan
from resihp.compiler.models import MODELS, Model
from resihp.compiler.prediction import predict
from resihp.compiler.pricing import Pricing
from resihp.compiler.schedules import ONE_STAGE, SCHEDULES
from resihp.compiler.simulate import simulate
from resihp.errors import NoFeasiblePlan, UserError
from resihp.ir.model import Batch, Mesh, ModelShape
from resihp.ir.parser import parse

A100 = CLUSTERS["a100-32x8"]
QWEN = MODELS["qwen2.5-7b"]
BATCH = Batch(microbatches=4, tokens=64)
LONG = Batch(microbatches=4, tokens=4096)


def small(layers: int, vocab: int) -> Model:
    """A model whose head is worth as many layers as its vocabulary says."""
    sizes = {"hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 128}
    return Model(shape=ModelShape(name="small", layers=layers, vocab=vocab, **sizes))


def pricing_of(model: Model) -> Pricing:
    costs = CostModel.of_description(model, A100, precision="bf16")
    return Pricing(model.shape, costs, A100, Health())


def recipe(tp=1, pp=2, dp=1, **changes) -> Recipe:
    return replace(Recipe(mesh=Mesh(tp=tp, pp=pp, dp=dp), batch=BATCH), **changes)


def counts_of(plan) -> list[int]:
    """Layers of each stage."""
    ranges = sorted({each for group in plan.groups for each in group.layers})
    return [each.last - each.first + 1 for each in ranges]


def position_times(plan, pricing) -> list[float]:
    """F + B + W of each position."""
    lengths = Lengths.of([plan.batch.tokens])
    return [
        sum(
            sum(cost.seconds(lengths) for cost in pricing.stage(layers, group.tp))
            for layers in group.layers
        )
        for group in plan.groups
        if group.replica == 0
    ]


@given(st.integers(1, 4), st.integers(0, 5), st.sampled_from([16, 2000, 20000]), st.data())
@settings(max_examples=40, deadline=None)
def test_no_split_that_fits_has_a_faster_slowest_stage(pp, more, vocab, data):
    """All splits are tried, in any memory that some split fits in."""
    pricing = pricing_of(small(pp + more, vocab))
    every = [
        split
        for split in itertools.product(range(1, pp + more + 1), repeat=pp)
        if sum(split) == pp + more
    ]
    plans = [healthy_plan(recipe(pp=pp, layers=split), pricing) for split in every]
    peaks = [max(peak_bytes(plan).values()) for plan in plans]
    memory = data.draw(st.sampled_from(sorted(set(peaks))))
    best = min(
        max(position_times(plan, pricing))
        for plan, peak in zip(plans, peaks, strict=True)
        if peak <= memory
    )
    found = healthy_plan(recipe(pp=pp, layers="balanced", memory_bytes=memory), pricing)
    assert max(position_times(found, pricing)) == pytest.approx(best)
    assert max(peak_bytes(found).values()) <= memory
    with pytest.raises(NoFeasiblePlan, match="nor do other splits"):
        healthy_plan(recipe(pp=pp, memory_bytes=min(peaks) - 1), pricing)


def test_the_stage_with_a_large_head_gets_fewer_layers():
    """The head of Qwen2.5-7B is worth more than two layers."""
    pricing = pricing_of(QWEN)
    asked = recipe(4, 4, 1, batch=LONG)
    assert counts_of(healthy_plan(replace(asked, layers="even"), pricing)) == [7, 7, 7, 7]
    assert counts_of(healthy_plan(asked, pricing)) == [8, 7, 7, 6]


@pytest.mark.parametrize("microbatches", [4, 32])
@pytest.mark.parametrize("dp", [1, 8])
def test_the_split_is_the_one_that_simulates_fastest(microbatches, dp):
    """Reducing the gradients counts where there is little else to do."""
    pricing = pricing_of(QWEN)
    batch = Batch(microbatches=microbatches, tokens=4096)
    auto, *others = (
        simulate(healthy_plan(recipe(4, 4, dp, layers=layers, batch=batch), pricing), pricing)
        for layers in ("auto", "balanced", "even")
    )
    assert auto.iteration_s <= min(other.iteration_s for other in others)


@pytest.mark.parametrize("tokens", [4096, 8192])
def test_an_automatic_order_is_never_slower_than_a_named_one_where_memory_is_short(tokens):
    """A split that every named schedule has no room for leaves an automatic one little as well."""
    model = MODELS["qwen2.5-72b"]
    batch = Batch(microbatches=12, tokens=tokens)
    asked = recipe(8, 8, 4, batch=batch, precision="bf16", memory_bytes=A100.device.memory_bytes)
    pricing, seconds = pricing_of(model), dict[str, float]()
    for schedule in (*ONE_STAGE, "zb-auto"):
        with suppress(NoFeasiblePlan):
            plan = healthy_plan(replace(asked, schedule=schedule), pricing)
            seconds[schedule] = simulate(plan, pricing).iteration_s
    assert len(seconds) > 1
    assert seconds["zb-auto"] <= min(seconds.values()) * 1.001


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_its_stages_split_by_cost(schedule):
    """The verifier has nothing against them, and no position is much slower than another."""
    pricing = pricing_of(QWEN)
    asked = recipe(2, 4, 2, schedule=schedule, layers="balanced", batch=LONG, precision="bf16")
    plan = healthy_plan(replace(asked, memory_bytes=1 << 40), pricing)
    assert findings(plan) == []
    times = position_times(plan, pricing)
    assert max(times) / min(times) < 8 / 6


def test_a_split_may_be_given_stage_by_stage():
    """Or it is answered with what is wrong with it, and an even one."""
    pricing = pricing_of(small(8, 16))
    assert counts_of(healthy_plan(recipe(pp=3, layers=(2, 5, 1)), pricing)) == [2, 5, 1]
    for wrong in ((2, 6), (2, 5, 2), (0, 7, 1)):
        with pytest.raises(UserError, match=r"need 8 in all; an even split is 3,3,2"):
            healthy_plan(recipe(pp=3, layers=wrong), pricing)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ((3, 1, 1), r"tp=3 must be a power of two; nearest valid: 2 \(1, 2, 4 are\)"),
        ((8, 1, 1), r"tp=8 must divide heads=28; nearest valid: 4"),
        ((1, 29, 1), r"pp=29: qwen2.5-7b has 28 layers; nearest valid: 28"),
        ((4, 4, 17), r"are 272 devices and a100-32x8 has 256; nearest valid: dp=16"),
        ((4, 0, 1), r"pp=0 must be at least 1"),
        ((-2, 1, 1), r"tp=-2 must be at least 1"),
    ],
)
def test_degrees_that_cannot_be_are_answered_with_the_nearest(degrees, message):
    """Heads, layers, devices."""
    with pytest.raises(UserError, match=message):
        healthy_plan(recipe(*degrees), pricing_of(QWEN))
    assert degrees_of(QWEN.shape) == [1, 2, 4]


def test_more_work_than_is_verified_is_refused_before_it_is_made():
    """With the most that would be."""
    batch = Batch(microbatches=10**9, tokens=64)
    with pytest.raises(UserError, match="nearest valid"):
        healthy_plan(recipe(batch=batch), pricing_of(QWEN))


def test_the_share_of_peak_flops_is_nearly_the_efficiency_where_nobody_waits():
    """One device, 60 % of whose peak linear layers reach and attention less."""
    plan = healthy_plan(recipe(pp=1, batch=LONG, precision="bf16"), pricing_of(QWEN))
    found = predict(plan, QWEN, pricing_of(QWEN))
    assert found.bubble_share == pytest.approx(0.0, abs=1e-9)
    assert 0.5 < found.flops_share < 0.6
    assert found.tokens_per_s == pytest.approx(4 * 4096 / found.iteration_s)


def plan(*argv: str) -> int:
    """`resihp plan` of a small share of the cluster."""
    mesh = ["--tp", "4", "--pp", "4", "--dp", "2", "--microbatches", "8", "--tokens", "2048"]
    return main(["plan", "--model", "llama2-13b", *mesh, *argv])


def test_the_verb_writes_a_verified_plan_and_tells_what_to_expect(capsys):
    """The plan on stdout, the prediction on stderr."""
    assert plan("--precision", "bf16", "--schedule", "zb-h1") == 0
    written = capsys.readouterr()
    made = parse(written.out).plan
    assert (made.precision, made.schedule, made.memory_bytes) == ("bf16", "zb-h1", 80 << 30)
    assert findings(made) == []
    assert "llama2-13b in bf16 on a100-32x8 (32 of 256 devices): zb-h1, layers 10,10" in written.err
    assert "bubble" in written.err


def test_documents_that_a_plan_was_priced_with_are_told_and_written(tmp_path, capsys):
    """`simulate` with the file that is named takes as long as was predicted."""
    file = tmp_path / "x.plan"
    assert plan("--precision", "bf16", "-o", str(file), "--documents", "4") == 0
    told = capsys.readouterr().err
    assert f"--lengths {tmp_path / 'x.lengths'}" in told
    assert main(["simulate", str(file), "--lengths", str(tmp_path / "x.lengths")]) == 0
    page = capsys.readouterr().out
    assert page.split("   ")[0] == told.splitlines()[1].split(",")[0]


def test_tp_over_nodes_is_told(capsys):
    """Its all-reduces cross them in every layer."""
    words = ["--model", "llama2-7b", "--tp", "16", "--pp", "1", "--dp", "1"]
    assert plan(*words, "--cluster", "a100-32x8") == 0
    assert "TP 16 is more than the 8 devices of a node" in capsys.readouterr().err


def test_the_verb_writes_json_by_name(tmp_path):
    """Other programs read it."""
    file = tmp_path / "x.json"
    assert plan("--precision", "bf16", "-o", str(file), "--transport", "rank") == 0
    assert main(["verify", str(file)]) == 0


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--layers", "10,x"], 2, "--layers 10,x: wanted is auto, balanced, even or a list"),
        (["--schedule", "1fib"], 2, "did you mean 1f1b?"),
        (["--chunks", "3"], 2, "schedule 1f1b with 3 stages per position: nearest valid: 1"),
        (["--memory", "80GB"], 2, "--memory 80GB: must be a whole number and KiB"),
        (["--memory", "1GiB"], 4, "a larger tp or pp needs less"),
        (["--cluster", "b200"], 2, "is no preset"),
        (["--microbatches", "0"], 2, "--microbatches 0: must be at least 1"),
        (["--dp", "4096"], 2, "no preset has 65536 devices"),
        (["--tp", "0"], 2, "--tp 0: must be at least 1"),
        (["--memory", "1KiB"], 4, "a device has 1 KiB"),
        (["--tokens", "99999999999"], 2, "nearest valid: 67108864"),
        (["--tp", "1", "--pp", "1", "--dp", "1"], 4, "on each of 1 device and no preset has as"),
        (["--transport", "pigeon"], 2, "unknown transport"),
        (["--model", "gpt"], 2, "model 'gpt' is none of"),
    ],
)
def test_the_verb_answers_wrong_use_in_words(capsys, argv, status, message):
    """What, and what would do."""
    assert plan(*argv) == status
    assert message in capsys.readouterr().err
