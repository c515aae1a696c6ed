"""Costs that come from a measured profile: read, fitted, told; what was not measured follows."""

from __future__ import annotations

import json

import pytest
from plan_cases import plan_of

from resihp.cli import main
from resihp.compiler.cluster import CLUSTERS
from resihp.compiler.costs import CostModel, Lengths, OpCost
from resihp.compiler.measured import Sample, measured_costs, samples_in
from resihp.compiler.models import MODELS
from resihp.errors import UserError
from resihp.ir.printer import print_plan

DESCRIBED = CostModel.of_description(MODELS["llama2-7b"], CLUSTERS["a100-32x8"], max_tp=4)
TRUE = {"F": OpCost(3e-7, 2e-11), "B": OpCost(4e-7, 5e-11), "W": OpCost(2e-7)}
DOCUMENTS = ((4096,), (1024, 3072), (512,) * 8, (2048,))


def sample(op: str, documents: tuple[int, ...], tp: int = 2, layers: int = 4, factor: float = 1.0):
    """As the true costs have it, times `factor`."""
    seconds = factor * max(layers, 1) * TRUE[op].seconds(Lengths.of(documents))
    said = {"op": op, "layers": layers, "tp": tp, "tokens": sum(documents), "seconds": seconds}
    return {**said, "documents": documents}


def read(*samples: dict[str, object]) -> list[Sample]:
    return samples_in("\n".join(map(json.dumps, samples)).encode(), "p.jsonl")


EXACT = [sample(op, documents) for op in TRUE for documents in DOCUMENTS]


def test_samples_without_noise_give_the_true_coefficients_of_one_layer():
    """Whatever the price from FLOPs was."""
    found = measured_costs(read(*EXACT), DESCRIBED)
    for cost, true in zip(found.layer[2], TRUE.values(), strict=True):
        assert cost.per_token_s == pytest.approx(true.per_token_s)
        assert cost.per_pair_s == pytest.approx(true.per_pair_s)
    assert all(each.explained == pytest.approx(1) for each in found.fits)
    assert [each.op for each in found.fits] == ["F", "B", "W"]


def test_what_was_not_measured_follows_the_nearest_degree_that_was():
    """Other TP degrees and the head are as much slower than their FLOPs say."""
    found = measured_costs(read(*EXACT), DESCRIBED)
    lengths = [Lengths.of(each) for each in DOCUMENTS]
    for tp in (1, 4):
        for op in range(3):
            ratio = found.layer[tp][op].seconds(lengths[0]) / DESCRIBED.layer[tp][op].seconds(
                lengths[0]
            )
            measured = sum(found.layer[2][op].seconds(each) for each in lengths)
            expected = sum(DESCRIBED.layer[2][op].seconds(each) for each in lengths)
            assert ratio == pytest.approx(measured / expected)
    measured = sum(TRUE["F"].seconds(each) for each in lengths)
    expected = sum(DESCRIBED.layer[2][0].seconds(each) for each in lengths)
    head = found.head[2][0].per_token_s / DESCRIBED.head[2][0].per_token_s
    assert head == pytest.approx(measured / expected)


def test_samples_that_cannot_tell_tokens_from_pairs_scale_the_price():
    """One document of one length: the proportion of both stays that of the FLOPs."""
    found = measured_costs(read(sample("F", (4096,))), DESCRIBED)
    forward, described = found.layer[2][0], DESCRIBED.layer[2][0]
    assert forward.seconds(Lengths.of((4096,))) == pytest.approx(
        TRUE["F"].seconds(Lengths.of((4096,)))
    )
    assert forward.per_pair_s / forward.per_token_s == pytest.approx(
        described.per_pair_s / described.per_token_s
    )
    assert found.fits[0].is_scaled


def test_the_head_is_measured_alone():
    """As a sample of no layers."""
    head = sample("F", (2048,), layers=0)
    found = measured_costs(read(*EXACT, head), DESCRIBED)
    assert found.head[2][0].per_token_s == pytest.approx(head["seconds"] / 2048)
    assert found.fits[-1].part == "head"


def test_noise_is_told_as_residuals():
    """Half of the samples take a tenth longer."""
    noisy = [sample("F", each, factor=1.1 if n % 2 else 1.0) for n, each in enumerate(DOCUMENTS)]
    found = measured_costs(read(*noisy), DESCRIBED).fits[0]
    assert 0.01 < found.mean_relative_error < 0.1
    assert found.rms_error_s > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "X"}, "p.jsonl:1: no measured sample"),
        ({"seconds": 0}, "p.jsonl:1: no measured sample"),
        ({"speed": 1}, "p.jsonl:1: no measured sample"),
        ({"tokens": 7}, "the documents have 4096 tokens, not 7"),
        ({"pairs": 9}, "leave one out"),
        ({"documents": None, "pairs": 9}, "4096 tokens have 4096 to 16777216 pairs"),
    ],
)
def test_what_is_no_sample_is_refused_with_its_line(change, message):
    with pytest.raises(UserError, match=message):
        read({**sample("F", (4096,)), **change})


def test_a_profile_of_other_degrees_is_refused():
    """And an empty one."""
    with pytest.raises(UserError, match=r"no sample of a layer at TP 1, 2, 4"):
        measured_costs(read(sample("F", (4096,), tp=8)), DESCRIBED)
    with pytest.raises(UserError, match="holds no measured sample"):
        read()


def test_every_verb_that_prices_takes_a_profile_and_tells_its_residuals(tmp_path, capsys):
    """A profile that is ten times as slow gives an iteration that is about as much longer."""
    plan, profile = tmp_path / "a.plan", tmp_path / "p.jsonl"
    plan.write_text(print_plan(plan_of()))
    words = [str(plan), "--cluster", "a100-32x8", "--format", "json"]
    assert main(["simulate", *words]) == 0
    expected_s = json.loads(capsys.readouterr().out)["compute_s"]
    slow = [sample(op, (32,), layers=1) | {"seconds": 10 * expected_s} for op in TRUE]
    profile.write_text("\n".join(map(json.dumps, slow)))
    for verb in ("simulate", "adapt"):
        assert main([verb, *words, "--profile", str(profile)]) == 0
        printed = capsys.readouterr()
        assert "profile: layer TP 2 F scaled to 1 sample: " in printed.err
        found = json.loads(printed.out)
        assert found["iteration_s"] > 10 * expected_s
        assert [each["op"] for each in found["fits"]] == ["F", "B", "W"]
