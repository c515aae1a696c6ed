"""`config.json` of Hugging Face checkpoints, read into `[model]`."""

from __future__ import annotations

import json

import pytest

from resihp.config import ModelConfig, RopeScaling, load, loads, resolved
from resihp.errors import ConfigError

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""The shape and spelling of Qwen2.5-0.5B."""

READ = ModelConfig(
    model_type="qwen2",
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
)

JOB = """\
[job]
steps = 3
[model]
config = "config.json"
[parallel]
tp = 2
[batch]
microbatches = 2
tokens = 64
"""
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def read(tmp_path, job=JOB, **changes):
    """What a job is that names a file beside it."""
    fields = {key: value for key, value in (QWEN | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    (tmp_path / "job.toml").write_text(job, encoding="utf-8")
    return load(tmp_path / "job.toml")


def test_a_job_names_the_file_of_its_model(tmp_path):
    """All that decides the computation is read; the rest of the file is ignored."""
    assert read(tmp_path).model == READ


def test_the_resolved_job_needs_the_file_no_more(tmp_path):
    """What a run leaves behind says the model itself."""
    job = read(tmp_path, rope_scaling={"type": "yarn", **YARN})
    (tmp_path / "config.json").unlink()
    assert loads(resolved(job)) == job


def test_keys_of_the_job_win(tmp_path):
    """Fewer layers of the same model."""
    fewer = JOB.replace('"config.json"', '"config.json"\nnum_hidden_layers = 2')
    assert read(tmp_path, fewer).model.num_hidden_layers == 2


def test_missing_keys_have_the_defaults_of_hugging_face(tmp_path):
    """As many key/value heads as heads, an epsilon of 1e-6, a base of 10,000, untied tables."""
    left_out = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    model = read(tmp_path, **dict.fromkeys(left_out)).model
    assert model.num_key_value_heads == 14
    assert (model.rms_norm_eps, model.rope_theta) == (1e-6, 1e4)
    assert not model.tie_word_embeddings


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", "type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
        },
    ],
)
def test_every_spelling_of_rope_scaling_is_read(tmp_path, spelling):
    """`type` of older files, `rope_type`, and `rope_parameters` with the base inside."""
    scaling = RopeScaling(rope_type="yarn", **YARN)
    model = read(tmp_path, **spelling).model
    assert (model.rope_scaling, model.rope_theta) == (scaling, 1e6)


def test_a_llama_may_have_biases_and_a_stretched_context(tmp_path):
    """The keys of Llama 3.1, and `attention_bias`."""
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = read(tmp_path, model_type="llama", attention_bias=True, rope_scaling=llama3).model
    assert model.attention_bias
    assert model.rope_scaling == RopeScaling(**llama3)


REFUSED = [
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not computed here; only 'silu' is"),
    ({"use_sliding_window": True}, "use_sliding_window = True is not computed here"),
    ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not computed here; only 0.0 is"),
    ({"head_dim": 128}, "head_dim = 128 is not computed here; only 64 is"),
    ({"model_type": "llama", "mlp_bias": True}, "mlp_bias = True is not computed here"),
    (
        {"model_type": "mamba"},
        'not the config.json of a llama or qwen2: model_type = "mamba": must be "llama" or',
    ),
    ({"hidden_size": None}, "missing required field hidden_size"),
    (
        {"rope_scaling": {"rope_type": "yarn", "mscale": 0.7, **YARN}},
        "rope_scaling has mscale = 0.7, which is not read here",
    ),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        'rope_type = "dynamic": must be "default" or "linear" or "llama3" or "yarn"',
    ),
    ({"num_key_value_heads": 3}, "must divide num_attention_heads (14); nearest valid: 2"),
    ({"hidden_size": "896"}, "hidden_size: expected int, got str"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_a_model_that_is_not_computed_is_refused_by_name(tmp_path, change, message):
    """It must not train as another one."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, **change)
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    """With the job that names it."""
    (tmp_path / "job.toml").write_text(JOB, encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"job.toml:4: model.config = .*config.json cannot be read"
    ):
        load(tmp_path / "job.toml")


@pytest.mark.parametrize("data", [b"", b"[1, 2]", b"\xff\xfe", b"{" * 5000, b" " * ((1 << 20) + 1)])
def test_what_is_no_config_is_refused(tmp_path, data):
    """Whatever bytes are in the file."""
    (tmp_path / "config.json").write_bytes(data)
    (tmp_path / "job.toml").write_text(JOB, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(tmp_path / "job.toml")


def test_a_config_that_is_no_path_is_refused(tmp_path):
    """A number names no file."""
    (tmp_path / "job.toml").write_text(JOB.replace('"config.json"', "3"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.config = 3: must be the path"):
        load(tmp_path / "job.toml")
