"""Every family of models over TP degrees and partitions, against plain autograd."""

from __future__ import annotations

import pytest
import torch
from cases import LOSS_SCALE, SingleMember, assert_same_bits, run, text_batches
from families import (
    FAMILIES,
    models_and_degrees,
    relative_error,
    run_group,
    stages_over,
    untied,
    whole_parameters,
    windows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import loss_and_grads

from resihp.executor.model import StageOptions
from resihp.executor.models import build_model

PARTITIONS = [[(0, 2)], [(0, 0), (1, 2)]]
BF16_UNIT = 2.0**-9
"""Largest relative error of rounding to bf16."""

families = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())


@pytest.fixture
def batches(tmp_path):
    return text_batches(tmp_path, 4, num_tokens=32)


@families
@pytest.mark.parametrize("partition", PARTITIONS, ids=["one stage", "two stages"])
def test_one_member_has_the_bits_of_plain_autograd(batches, config, partition):
    """Biases, tied tables and stretched positions too."""
    model = build_model(config)
    parameters = whole_parameters(model)
    for batch in batches:
        loss, grads = run(stages_over(model, parameters, partition), batch)
        expected_loss, expected = loss_and_grads(config, parameters, batch, LOSS_SCALE)
        assert loss == expected_loss
        head = {source for pair in model.tied for source in pair}
        mine, theirs = (
            {name: grad for name, grad in of.items() if name not in head}
            for of in (grads, expected)
        )
        assert_same_bits(mine, theirs)
        # Autograd adds the two uses of a tied table in an order of its own.
        assert relative_error(untied(model, grads), expected) < 1e-6


@families
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("partition", PARTITIONS, ids=["one stage", "two stages"])
def test_any_tp_degree_has_the_gradients_of_the_whole(batches, config, degree, partition):
    """In fp64, so that nothing but a wrong formula is seen: tables whose rows do not divide,
    key/value heads with copies, biases added once."""
    model = build_model(config)
    parameters = whole_parameters(model, torch.float64)
    for batch in batches[:2]:
        loss, grads = run_group(model, parameters, partition, batch, degree)
        expected_loss, expected = loss_and_grads(config, parameters, batch, LOSS_SCALE)
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        assert relative_error(untied(model, grads), expected) < 1e-12


@settings(max_examples=40, deadline=None)
@given(st.data(), models_and_degrees(), st.booleans())
def test_any_model_at_any_degree_has_the_gradients_of_the_whole(data, drawn, recompute):
    """Heads, key/value heads, widths, vocabularies, scalings and windows at random, in fp64."""
    config, degree = drawn
    batch = data.draw(windows(config.vocab_size))
    model = build_model(config)
    cut = data.draw(st.integers(1, config.num_hidden_layers))
    last = config.num_hidden_layers - 1
    partition = [(0, cut - 1), (cut, last)] if cut <= last else [(0, last)]
    parameters = whole_parameters(model, torch.float64)
    options = StageOptions(recompute=recompute)
    loss, grads = run_group(model, parameters, partition, batch, degree, options)
    expected_loss, expected = loss_and_grads(config, parameters, batch, LOSS_SCALE)
    assert loss == pytest.approx(expected_loss, rel=1e-11)
    for name, grad in untied(model, grads).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-10 * scale + 1e-15)


@families
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputing_changes_no_bit(batches, config, degree, dtype):
    """Loss and gradients are the same whether B finds the graph of F or makes it anew."""
    model = build_model(config)
    parameters = whole_parameters(model, dtype)
    kept, recomputed = (
        run_group(model, parameters, PARTITIONS[1], batches[0], degree, StageOptions(recompute=on))
        for on in (False, True)
    )
    assert kept[0] == recomputed[0]
    assert_same_bits(recomputed[1], kept[1])


@families
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_bf16_is_as_near_to_the_truth_as_rounding_allows(batches, config, degree):
    """Against fp64 with the same (rounded) weights.

    A value is rounded about 20 times on its way through a layer and back (norm, projections,
    rotation, attention, output, residual, and as often in B), so 3 layers and the head keep the
    relative error of a gradient below 64 units, were all roundings to add up. Plain autograd in
    bf16 is about as near; of k members each rounds its part of a sum of its own, hence √k.
    """
    model = build_model(config)
    rounded = whole_parameters(model, torch.bfloat16)
    exact = {name: tensor.double() for name, tensor in rounded.items()}
    for batch in batches[:2]:
        loss, grads = run_group(model, rounded, PARTITIONS[1], batch, degree)
        assert all(grad.dtype == torch.float32 for grad in grads.values())
        expected_loss, expected = loss_and_grads(config, exact, batch, LOSS_SCALE)
        _, plain = loss_and_grads(config, rounded, batch, LOSS_SCALE)
        error = relative_error(untied(model, grads), expected)
        assert loss == pytest.approx(expected_loss, rel=8 * BF16_UNIT)
        assert 0.0 < error < 64 * BF16_UNIT
        assert error < 1.25 * degree**0.5 * relative_error(plain, expected)


@families
def test_every_form_of_attention_gives_the_same_gradients(batches, config):
    """The option reaches the layers, and the textbook's masked form agrees, in fp64."""
    model = build_model(config)
    parameters = whole_parameters(model, torch.float64)
    packed = next(batch for batch in batches if len(batch.cu_seqlens) > 2)
    (loss, grads), (masked_loss, masked) = (
        run_group(model, parameters, PARTITIONS[0], packed, 1, StageOptions(attention=form))
        for form in ("per-document", "masked")
    )
    assert masked_loss == pytest.approx(loss, rel=1e-12)
    assert 0.0 < relative_error(masked, grads) < 1e-12


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w_into_a_sum_adds_what_w_would_have_made(batches, config, dtype):
    """Two micro-batches into one sum, to rounding; nothing is left in the stage."""
    model = build_model(config)
    parameters = whole_parameters(model, dtype)
    (stage,) = stages_over(model, parameters, PARTITIONS[0])
    sums = {name: torch.zeros(p.shape) for name, p in stage.parameters.items()}
    expected = {name: total.clone() for name, total in sums.items()}
    for batch in batches[:2]:
        for name, grad in run([stage], batch)[1].items():
            expected[name] += grad
        stage.forward((0, 0), batch, None, loss_scale=LOSS_SCALE)
        stage.backward_input((0, 0), None)
        stage.add_weight_gradients((0, 0), sums)
    assert stage.is_idle
    assert relative_error(sums, expected) < 1e-6


def test_what_crosses_stages_in_bf16_is_bf16(batches):
    """Half the bytes, as plans of that precision say."""
    config = FAMILIES["qwen2"]
    model = build_model(config)
    first, last = stages_over(model, whole_parameters(model, torch.bfloat16), PARTITIONS[1])
    y_TD = first.forward((0, 0), batches[0], None, loss_scale=1.0)
    assert y_TD is not None and y_TD.dtype == torch.bfloat16
    last.forward((0, 0), batches[0], y_TD, loss_scale=1.0)
    dx_TD = last.backward_input((0, 0), None)
    assert dx_TD is not None and dx_TD.dtype == torch.bfloat16


@families
def test_tied_tables_start_equal_and_untied_ones_do_not(config):
    """A tied model's head is a tensor of its own with the embedding's values."""
    model = build_model(config)
    tables = [model.initial(name, 5) for name in ("model.embed_tokens.weight", "lm_head.weight")]
    assert torch.equal(*tables) == config.tie_word_embeddings == bool(model.tied)


@families
def test_biases_start_at_zero(config):
    """And norms at one, as in the checkpoints' own code."""
    model = build_model(config)
    vectors = [name for name in model.tensors(0, 2) if len(model.layout(name).shape) == 1]
    for name in vectors:
        expected = 0.0 if name.endswith(".bias") else 1.0
        assert (model.initial(name, 0) == expected).all()
    assert any(name.endswith(".bias") for name in vectors) == config.qkv_bias


def test_every_tensor_is_in_the_checkpoint_and_in_its_order():
    """Names of a layer of Qwen2.5: biases directly after their weights."""
    model = build_model(FAMILIES["qwen2"])
    names = [name.removeprefix("model.layers.1.") for name in model.tensors(1, 1)]
    assert names[1:8] == [
        "self_attn.q_proj.weight",
        "self_attn.q_proj.bias",
        "self_attn.k_proj.weight",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.weight",
        "self_attn.v_proj.bias",
        "self_attn.o_proj.weight",
    ]


def test_a_stage_that_recomputes_can_be_discarded(batches):
    """Between F and B it holds its input only, which an aborted iteration lets go."""
    model = build_model(FAMILIES["llama"])
    (stage,) = stages_over(
        model, whole_parameters(model), PARTITIONS[0], SingleMember(), StageOptions(recompute=True)
    )
    stage.forward((0, 0), batches[0], None, loss_scale=1.0)
    assert not stage.is_idle
    stage.discard_all()
    assert stage.is_idle
