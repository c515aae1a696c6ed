"""The same weights in Hugging Face's own LLaMA and Qwen2: logits, loss and gradients.

Needs `transformers`, of requirements-dev.txt. Its norms are fp32 whatever the type of the model,
so both sides run in fp32, and the tolerance is that of some hundred roundings.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from cases import LOSS_SCALE, text_batches
from families import (
    FAMILIES,
    models_and_degrees,
    relative_error,
    run_group,
    untied,
    whole_parameters,
    windows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import logits

from resihp.config import ModelConfig, loads
from resihp.executor.models import build_model

transformers: Any = pytest.importorskip("transformers", reason="parity needs transformers")

TOLERANCE = 128 * 2.0**-24
PARTITION = [(0, 0), (1, 2)]

families = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())


@pytest.fixture
def batches(tmp_path):
    return text_batches(tmp_path, 2, num_tokens=32)


def hugging_face_config(config: ModelConfig) -> Any:
    fields = {
        name: getattr(config, name)
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
            "rms_norm_eps",
            "initializer_range",
            "tie_word_embeddings",
        )
    }
    scaling = config.rope_scaling
    rope: dict[str, object] = {"rope_type": "default"}
    if scaling is not None:
        said = {name: getattr(scaling, name) for name in _ROPE[scaling.rope_type]}
        rope = {name: value for name, value in said.items() if value is not None}
    rope["rope_theta"] = config.rope_theta
    if config.model_type == "qwen2":
        return transformers.Qwen2Config(**fields, rope_parameters=rope)
    bias = config.attention_bias
    return transformers.LlamaConfig(**fields, rope_parameters=rope, attention_bias=bias)


_CONTEXT = ("rope_type", "factor", "original_max_position_embeddings")
_ROPE = {
    "default": ("rope_type",),
    "linear": ("rope_type", "factor"),
    "llama3": (*_CONTEXT, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_CONTEXT, "beta_fast", "beta_slow", "attention_factor"),
}


def hugging_face_model(config: ModelConfig, parameters: dict[str, torch.Tensor]) -> Any:
    with torch.device("cpu"):
        model = transformers.AutoModelForCausalLM.from_config(
            hugging_face_config(config), attn_implementation="eager", dtype=torch.float32
        )
    missing, unexpected = model.load_state_dict(parameters, strict=True)
    assert not missing and not unexpected
    return model


def hugging_face_logits(model: Any, batch: Any) -> torch.Tensor:
    """Each segment on its own, as a sequence that begins at position 0."""
    return torch.cat(
        [
            model(input_ids=batch.input_ids_T[None, start:end], use_cache=False).logits[0]
            for start, end in pairwise(batch.cu_seqlens)
        ]
    )


@families
def test_the_oracle_has_the_logits_of_hugging_face(batches, config):
    """What our stages are compared with elsewhere computes the models of that name."""
    parameters = whole_parameters(build_model(config))
    model = hugging_face_model(config, parameters)
    with torch.no_grad():
        for batch in batches:
            ours_TV = logits(config, parameters, batch)
            theirs_TV = hugging_face_logits(model, batch)
            error = float((ours_TV - theirs_TV).norm() / theirs_TV.norm())
            assert error < TOLERANCE


@settings(max_examples=20, deadline=None)
@given(st.data(), models_and_degrees())
def test_the_oracle_has_the_logits_of_hugging_face_for_any_model(data, drawn):
    """Any heads, widths, vocabulary, biases and scaling."""
    config, _ = drawn
    batch = data.draw(windows(config.vocab_size))
    parameters = whole_parameters(build_model(config))
    with torch.no_grad():
        theirs_TV = hugging_face_logits(hugging_face_model(config, parameters), batch)
    ours_TV = logits(config, parameters, batch)
    assert float((ours_TV - theirs_TV).norm() / theirs_TV.norm()) < TOLERANCE


@families
@pytest.mark.parametrize("degree", [1, 4])
def test_stages_have_the_loss_and_gradients_of_hugging_face(batches, config, degree):
    """Every parameter of the checkpoint, by its name."""
    ours = build_model(config)
    parameters = whole_parameters(ours)
    for batch in batches:
        theirs = hugging_face_model(config, parameters)
        logits_TV = hugging_face_logits(theirs, batch)
        expected_loss = nnf.cross_entropy(logits_TV, batch.targets_T, reduction="sum")
        (expected_loss * LOSS_SCALE).backward()
        expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
        loss, grads = run_group(ours, parameters, PARTITION, batch, degree)
        assert loss == pytest.approx(float(expected_loss.detach()), rel=TOLERANCE)
        assert relative_error(untied(ours, grads), expected) < TOLERANCE


@families
def test_the_config_that_hugging_face_writes_is_read_as_ours(tmp_path, config):
    """A job may name the file of a checkpoint."""
    path = tmp_path / "config.json"
    path.write_text(hugging_face_config(config).to_json_string(), encoding="utf-8")
    job = loads(
        f"[job]\nsteps = 1\n[model]\nconfig = {json.dumps(str(path))}\n"
        "[batch]\nmicrobatches = 1\ntokens = 8\n"
    )
    assert job.model == config
