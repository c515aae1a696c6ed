"""Models, clusters and costs: against published counts and what the formulas imply."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.compiler.cluster import CLUSTERS, Cluster, Health, SlowLink, find_cluster
from resihp.compiler.costs import CostModel, Lengths, OpCost
from resihp.compiler.hf_config import model_of_config
from resihp.compiler.models import MODELS, find_model, layer_flops
from resihp.compiler.profile import fit
from resihp.config.toml import read_text
from resihp.errors import ConfigError, UserError
from resihp.ir.model import LayerRange, Op

# Parameters of the published checkpoints (their model cards); llama2-34b: Code Llama 34B, which
# has the same shape and a vocabulary of 32,000.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-34b": 33_743_970_304,
    "llama2-70b": 68_976_648_192,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
}
A100 = CLUSTERS["a100-32x8"]
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
CLUSTER_TOML = """
[cluster]
name = "two"
nodes = 2
gpus_per_node = 4

[device]
memory_gib = 40
bf16_tflops = 100
fp32_tflops = 10

[intra_node]
gb_per_s = 100
latency_us = 5

[inter_node]
gb_per_s = 10
latency_us = 10
"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_its_published_checkpoint(name):
    """To the last parameter, embedding and head included."""
    assert MODELS[name].num_parameters == PUBLISHED[name]


def test_the_30b_that_does_not_exist_is_answered_with_the_shape_nearest_to_it():
    """There is no LLaMA 2 of 30B parameters."""
    with pytest.raises(UserError, match="no LLaMA 2 of 30B; llama2-34b"):
        find_model("LLaMA2-30B")


def test_a_misspelt_model_is_answered_with_the_nearest_name():
    """Close names are matched."""
    with pytest.raises(UserError, match=r"did you mean qwen2\.5-7b\?"):
        find_model("qwen2-7b")


def test_a_hugging_face_config_gives_the_preset_of_the_same_model():
    """Sizes, biases of Qwen2 and untied tables."""
    read = model_of_config(json.dumps(CONFIG).encode(), name="qwen2.5-7b", path="config.json")
    assert read == MODELS["qwen2.5-7b"]


def test_a_tied_table_counts_once():
    """`tie_word_embeddings` takes the head's table away."""
    config = json.dumps(CONFIG | {"tie_word_embeddings": True}).encode()
    tied = model_of_config(config, name="tied", path="config.json")
    assert MODELS["qwen2.5-7b"].num_parameters - tied.num_parameters == 152064 * 3584


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is none of"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_key_value_heads": 5}, "do not divide"),
        ({"head_dim": 64}, "head_dim 64 is not"),
        ({"use_sliding_window": True}, "use_sliding_window = true"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_a_config_of_another_kind_is_refused_with_the_reason(change, message):
    """The file's name and the field."""
    with pytest.raises(UserError, match=message):
        model_of_config(json.dumps(CONFIG | change).encode(), name="x", path="config.json")


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b" " * (1 << 21)])
def test_what_is_no_config_is_refused(data):
    """Whatever the bytes are."""
    with pytest.raises(UserError):
        model_of_config(data, name="x", path="config.json")


def test_forward_flops_come_to_two_per_parameter_and_token():
    """The known estimate, for the linear part of a layer without its norms."""
    model = MODELS["llama2-7b"]
    flops = layer_flops(model).linear_per_token
    assert flops == 2 * (model.layer_parameters - 2 * 4096)


def test_weight_gradients_have_no_attention_term():
    """Their cost depends on the number of tokens alone."""
    costs = CostModel.of_description(MODELS["llama2-7b"], A100)
    stage = costs.stage(LayerRange(0, 15), 32, 4)
    one_long, many_short = Lengths.of([8192]), Lengths.of([512] * 16)
    assert stage.of(Op.W).seconds(one_long) == stage.of(Op.W).seconds(many_short)
    assert stage.of(Op.F).seconds(one_long) > stage.of(Op.F).seconds(many_short)


def test_the_backward_grows_faster_with_length_than_the_forward():
    """The ratio of B to F is not one number (measured on production traces)."""
    stage = CostModel.of_description(MODELS["llama2-7b"], A100).stage(LayerRange(0, 15), 32, 4)

    def ratio(lengths: Lengths) -> float:
        return stage.of(Op.B).seconds(lengths) / stage.of(Op.F).seconds(lengths)

    assert ratio(Lengths.of([32768])) > 1.1 * ratio(Lengths.of([512] * 64))


def test_the_head_of_a_large_vocabulary_is_worth_more_than_two_layers():
    """152,064 rows of Qwen2.5-7B weigh as much as 2.3 of its layers."""
    costs = CostModel.of_description(MODELS["qwen2.5-7b"], A100)
    short = Lengths(8192, 0)
    head = costs.head[1][0].seconds(short)
    layer = costs.layer[1][0].seconds(short)
    assert head / layer == pytest.approx(2.3, abs=0.1)


def test_a_slow_member_slows_compute_and_not_the_all_reduce():
    """Half the speed is twice the compute; the links are what they were."""
    cost = OpCost(per_token_s=1.0, per_pair_s=0.0, comm_fixed_s=3.0, comm_per_token_s=0.5)
    lengths = Lengths(10, 0)
    assert cost.seconds(lengths, speed=0.5) == pytest.approx(20 + 3 + 5)


def test_twice_the_degree_halves_compute_and_adds_communication():
    """More members, less work each, longer all-reduces."""
    costs = CostModel.of_description(MODELS["llama2-13b"], A100)
    two, four = costs.layer[2][0], costs.layer[4][0]
    assert four.per_token_s == pytest.approx(two.per_token_s / 2)
    assert four.comm_per_token_s > two.comm_per_token_s


def test_a_cluster_file_reads_as_it_is_written():
    """Sections of the TOML are fields."""
    cluster = read_text(CLUSTER_TOML, Cluster, lambda _: (), path="two.toml")
    assert cluster.num_devices == 8
    assert cluster.node_of(5) == 1
    assert cluster.device.memory_bytes == 40 << 30


def test_a_wrong_key_of_a_cluster_file_is_named_with_its_line():
    """`nics` is not a key."""
    text = CLUSTER_TOML.replace("gpus_per_node = 4", "nics = 4")
    with pytest.raises(ConfigError, match=r"two\.toml:5: cluster\.nics.*nics_per_node"):
        read_text(text, Cluster, lambda _: (), path="two.toml")


def test_an_unknown_preset_is_answered_with_the_known_ones():
    """Their names are in the message."""
    with pytest.raises(UserError, match="a100-32x8"):
        find_cluster("h100")


def test_lost_ranks_have_no_speed_and_links_have_no_direction():
    """Health answers for every rank and pair of nodes."""
    health = Health(lost=frozenset({3}), speed={5: 0.5}, links=(SlowLink(nodes=(0, 1)),))
    assert [health.speed_of(rank) for rank in (3, 4, 5)] == [0.0, 1.0, 0.5]
    assert health.link(1, 0) is health.link(0, 1) is not None
    assert health.link(0, 2) is None


@given(
    alpha=st.floats(1e-9, 1e-3),
    beta=st.floats(0, 1e-6),
    lengths=st.lists(
        st.lists(st.integers(1, 4096), min_size=1, max_size=8), min_size=6, max_size=9
    ),
)
def test_a_fit_finds_the_coefficients_that_made_the_times(alpha, beta, lengths):
    """Without noise the residual vanishes."""
    samples = [Lengths.of(documents) for documents in lengths]
    seconds = [alpha * tokens + beta * pairs for tokens, pairs in samples]
    found = fit(samples, seconds)
    assert found.rms_error_s <= 1e-6 * max(seconds)


def test_a_fit_reports_what_it_does_not_explain():
    """Noise of 5 % shows as a relative error of about that."""
    rng = np.random.default_rng(0)
    samples = [Lengths.of([int(n)]) for n in rng.integers(256, 8192, 200)]
    seconds = [
        (1e-6 * tokens + 1e-10 * pairs) * (1 + 0.05 * float(rng.standard_normal()))
        for tokens, pairs in samples
    ]
    found = fit(samples, seconds)
    assert 0.02 < found.mean_relative_error < 0.08
    assert found.explained > 0.9


def test_coefficients_never_become_negative():
    """Times that fall with length are explained by tokens alone."""
    samples = [Lengths(100, 100), Lengths(100, 5000), Lengths(100, 9000)]
    found = fit(samples, [3.0, 2.0, 1.0])
    assert found.cost.per_pair_s == 0.0
    assert found.cost.per_token_s == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("count", "times"), [(1, [1.0]), (2, [1.0, -1.0]), (2, [1.0, float("nan")])]
)
def test_a_fit_refuses_too_few_samples_and_impossible_times(count, times):
    """The user's measurements are to blame."""
    with pytest.raises(UserError):
        fit([Lengths(1, 1)] * count, times)
