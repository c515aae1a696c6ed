"""The search for degrees, micro-batches and schedule, against simulating every way to cut a job."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from plan_cases import findings

from resihp.cli import main
from resihp.compiler.capacity import peak_bytes
from resihp.compiler.cluster import CLUSTERS, ClusterSize, Health
from resihp.compiler.costs import CostModel, Lengths
from resihp.compiler.degrees import Job, candidates, search
from resihp.compiler.healthy import draft_plan, healthy_plan
from resihp.compiler.models import MODELS, Model
from resihp.compiler.prediction import predict
from resihp.compiler.pricing import Pricing
from resihp.errors import NoFeasiblePlan, UserError
from resihp.ir.parser import parse
from resihp.ir.plan_json import plan_of_json

FIXED = ("1f1b", "interleaved-1f1b", "zb-h1", "zbv")
SMALL = Model(
    shape=replace(MODELS["llama2-7b"].shape, name="small", layers=6, vocab=8000), qkv_bias=False
)
CLUSTER = replace(CLUSTERS["a100-32x8"], cluster=ClusterSize(name="two", nodes=2, gpus_per_node=4))
JOB = Job(num_devices=8, global_batch=8, sequence_tokens=1024, schedules=FIXED)


def pricing_of(model: Model, cluster=CLUSTER) -> Pricing:
    costs = CostModel.of_description(model, cluster, precision="bf16")
    return Pricing(model.shape, costs, cluster, Health())


def all_times(job: Job, model: Model) -> list[float]:
    """What every way to cut the job takes whose plan fits."""
    pricing, times = pricing_of(model), []
    for candidate in candidates(job, pricing):
        recipe = candidate.recipe(job)
        try:
            plan = healthy_plan(recipe, pricing)
        except NoFeasiblePlan:
            continue
        times.append(predict(plan, model, pricing, recipe.lengths).iteration_s)
    return times


@pytest.mark.parametrize("memory_gib", [None, 16, 6])
def test_the_first_choice_is_the_fastest_of_all_that_fit(memory_gib):
    """In any memory; its plan is verified and takes no longer than was said."""
    job = replace(JOB, memory_bytes=None if memory_gib is None else memory_gib << 30)
    result, plan = search(job, SMALL, pricing_of(SMALL))
    first = result.choices[0].prediction
    assert result.is_complete
    assert first.iteration_s <= 1.001 * min(all_times(job, SMALL))
    assert findings(plan) == []
    lengths = Lengths.of([1024] * result.choices[0].sequences)
    assert predict(plan, SMALL, pricing_of(SMALL), lengths).iteration_s <= first.iteration_s * 1.001
    assert job.memory_bytes is None or max(peak_bytes(plan).values()) <= job.memory_bytes


def test_every_way_uses_the_whole_batch_and_no_more_than_the_devices():
    """TP divides what it cuts and stays inside a node."""
    found = list(candidates(JOB, pricing_of(SMALL)))
    assert len(found) == len({candidate[1:] for candidate in found})
    for way in found:
        assert way.dp * way.microbatches * way.sequences == 8
        assert way.tp * way.pp * way.dp <= 8
        assert way.tp in (1, 2, 4)


@pytest.mark.parametrize("memory_gib", [4, 6, 10])
@pytest.mark.parametrize("vocab", [8_000, 150_000])
def test_no_way_is_left_out_whose_schedule_fits(memory_gib, vocab):
    """What is told at once is a bound, also where most memory is that of the tables."""
    model = replace(SMALL, shape=replace(SMALL.shape, vocab=vocab, layers=10))
    schedules = (*FIXED, "zb-h2", "gpipe", "looped-bfs")
    job = replace(JOB, memory_bytes=memory_gib << 30, sequence_tokens=4096, schedules=schedules)
    pricing = pricing_of(model)
    every = candidates(replace(job, memory_bytes=None), pricing)
    kept = set(candidates(job, pricing))
    for way in every:
        if way not in kept:
            with pytest.raises(NoFeasiblePlan):
                draft_plan(way.recipe(job, "balanced"), pricing)


def test_an_automatic_order_is_tried_where_the_others_are_fastest():
    """Or alone, if there is no other."""
    job = replace(JOB, memory_bytes=80 << 30, schedules=("1f1b", "zb-auto"))
    result, _ = search(job, SMALL, pricing_of(SMALL))
    assert {choice.schedule for choice in result.choices} == {"1f1b", "zb-auto"}
    alone, _ = search(replace(job, schedules=("zb-auto",)), SMALL, pricing_of(SMALL))
    assert {choice.schedule for choice in alone.choices} == {"zb-auto"}


@pytest.mark.parametrize("fewest", [2, 4])
def test_a_job_may_ask_for_so_many_replicas(fewest):
    """Where the state of a lost rank is."""
    result, _ = search(replace(JOB, fewest_replicas=fewest), SMALL, pricing_of(SMALL))
    assert min(choice.dp for choice in result.choices) >= fewest


def test_a_job_that_fits_nowhere_is_refused():
    """With what would need less."""
    with pytest.raises(NoFeasiblePlan, match="fewer replicas or shorter sequences need less"):
        search(replace(JOB, memory_bytes=1 << 20), SMALL, pricing_of(SMALL))


def test_an_unknown_schedule_is_answered_with_the_nearest():
    """As everywhere."""
    with pytest.raises(UserError, match="did you mean zb-h1"):
        search(replace(JOB, schedules=("zb-h1x",)), SMALL, pricing_of(SMALL))


def run(*argv: str) -> int:
    """`resihp search` of a small job."""
    job = ["--model", "llama2-7b", "--global-batch", "8", "--tokens", "1024"]
    return main(["search", *job, "--schedules", "1f1b,zb-h1", *argv])


def test_the_verb_lists_choices_and_writes_the_plan_of_the_first(capsys, tmp_path):
    """As text, and as JSON with the same figures."""
    plan = tmp_path / "best.plan"
    assert run("--gpus", "8", "-o", str(plan)) == 0
    table = capsys.readouterr()
    assert run("--gpus", "8", "--format", "json", "--top", "2") == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed["choices"]) == 2
    first, mesh = listed["choices"][0], parse(plan.read_text()).plan.mesh
    assert (mesh.tp, mesh.pp, mesh.dp) == (first["tp"], first["pp"], first["dp"])
    assert f"{first['prediction']['iteration_s']:.3f} s" in table.out.split("\n")[1]
    assert "a100-32x8, 8 devices, bf16" in table.err
    assert main(["verify", str(plan)]) == 0
    assert run("--gpus", "8", "-o", str(tmp_path / "best.json")) == 0
    read = plan_of_json((tmp_path / "best.json").read_bytes(), "best.json")
    assert read == parse(plan.read_text()).plan


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        ([], 2, "name a --cluster, or say with --gpus"),
        (["--gpus", "0"], 2, "--gpus 0: must be at least 1"),
        (["--gpus", "8", "--cluster", "nowhere"], 2, "is no preset"),
        (["--gpus", "8", "--top", "0"], 2, "--top 0: must be at least 1"),
        (["--gpus", "8", "--schedules", ""], 2, "schedule '' is none of"),
        (["--gpus", "16", "--global-batch", "31"], 2, "for 2 to 16 replicas; nearest valid: 32"),
        (["--gpus", "16", "--min-dp", "99"], 2, "99 replicas on 16 devices; nearest valid: 16"),
        (["--gpus", "8", "--tokens", "99999999999"], 2, "nearest valid: 67108864"),
        (["--gpus", "2", "--memory", "1GiB", "--cluster", "a100-32x8"], 4, "fits their memory"),
    ],
)
def test_the_verb_answers_wrong_use_in_words(capsys, argv, status, message):
    """What, and what would do."""
    assert run(*argv) == status
    assert message in capsys.readouterr().err
