"""What the command line says of clusters, health and lengths, read into descriptions."""

from __future__ import annotations

import argparse
import json

import pytest

from resihp.cli import described
from resihp.compiler.cluster import CLUSTERS, SlowLink
from resihp.compiler.costs import Lengths
from resihp.compiler.defaults import default_cluster, model_of_plan
from resihp.compiler.models import MODELS
from resihp.errors import UserError
from resihp.ir.model import Batch, Mesh, ModelShape, Plan

TINY = ModelShape(name="tiny", layers=4, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=64)


def plan_of(shape=TINY, tp=4, pp=2, dp=4, memory_bytes=None) -> Plan:
    """Only what descriptions look at."""
    return Plan(
        model=shape,
        mesh=Mesh(tp=tp, pp=pp, dp=dp),
        batch=Batch(microbatches=3, tokens=100),
        groups=(),
        streams=(),
        memory_bytes=memory_bytes,
    )


def said(*argv: str) -> argparse.Namespace:
    """The command line of a verb that takes everything."""
    parser = argparse.ArgumentParser()
    described.add_cluster(parser)
    described.add_health(parser)
    described.add_lengths(parser)
    return parser.parse_args(argv)


def health(*argv: str, num_ranks: int = 32):
    """On nodes of eight devices."""
    return described.health_of(said(*argv), CLUSTERS["a100-32x8"], num_ranks)


def test_lost_ranks_are_named_one_by_one_in_ranges_and_by_node():
    """The last node of a job may be in part outside it."""
    read = health("--fail", "rank=1,4..6", "--fail", "node=3", num_ranks=28)
    assert sorted(read.lost) == [1, 4, 5, 6, 24, 25, 26, 27]


def test_slow_ranks_have_a_share_of_the_healthy_speed():
    """A healthy speed says nothing; a lost rank is not slow; the later statement counts."""
    read = health(
        "--slow",
        "rank=1:0.5",
        "--slow",
        "rank=1,2,3:0.25",
        "--slow",
        "rank=2:1",
        "--fail",
        "rank=3",
    )
    assert (read.speed, read.lost) == ({1: 0.25}, frozenset({3}))


def test_slow_links_have_a_factor_or_a_delay_or_both():
    """The later statement about the same two nodes counts."""
    read = health(
        "--link", "0-1:x9", "--link", "1-0:x2", "--link", "1-2:+30ms", "--link", "0-3:x1.5+500us"
    )
    assert read.links == (
        SlowLink(nodes=(1, 0), factor=2.0),
        SlowLink(nodes=(1, 2), delay_s=0.03),
        SlowLink(nodes=(0, 3), factor=1.5, delay_s=0.0005),
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--fail", "5"], "--fail 5: wanted is rank=5, rank=5,8..11 or node=2"),
        (["--fail", "rank=32"], "--fail rank=32: the job has ranks 0..31; nearest valid: 31"),
        (["--fail", "node=4"], "--fail node=4: the job has nodes 0..3; nearest valid: 3"),
        (["--fail", "rank=6..5"], "6..5 runs backwards; nearest valid: 5..6"),
        (["--fail", "rank=0..999999999"], "the job has ranks 0..31"),
        (["--slow", "rank=5"], "--slow rank=5: wanted is a share of a healthy speed"),
        (["--slow", "5:0.5"], "--slow 5:0.5: wanted is rank=12:0.5 or node=2:0.9"),
        (["--slow", "rank=5:0"], "use --fail"),
        (["--slow", "rank=5:2"], "nearest valid: 1"),
        (["--slow", "rank=5:nan"], "nearest valid: 1"),
        (["--link", "0-1"], "wanted is NODE-NODE"),
        (["--link", "0-1:"], "wanted is NODE-NODE"),
        (["--link", "0-0:x2"], "not inside node 0"),
        (["--link", "0-4:x2"], "the job has nodes 0..3; nearest valid: 3"),
        (["--link", "0-1:x0.5"], "a slow link takes 1 to"),
        (["--link", "0-1:+9999s"], "longer than 3600s"),
    ],
)
def test_words_that_say_nothing_are_answered_with_what_is_wanted(argv, message):
    """The option, the word, and a valid choice."""
    with pytest.raises(UserError) as error:
        health(*argv)
    assert message in str(error.value)


@pytest.mark.parametrize("ending", ["json", "toml"])
def test_a_file_says_what_the_options_say_and_they_count_over_it(tmp_path, ending):
    """In JSON and in TOML."""
    file = tmp_path / f"health.{ending}"
    words = {"fail": ["rank=5"], "slow": ["rank=1:0.5", "rank=2:0.5"], "link": ["0-1:x2"]}
    lines = [f"{key} = {json.dumps(value)}" for key, value in words.items()]
    file.write_text(json.dumps(words) if ending == "json" else "\n".join(lines))
    read = health("--health", str(file), "--slow", "rank=2:0.9", "--fail", "rank=6")
    assert read == health(
        *["--fail", "rank=5,6", "--slow", "rank=1:0.5", "--slow", "rank=2:0.9", "--link", "0-1:x2"]
    )


@pytest.mark.parametrize("text", ["{", '{"lost": []}', '{"fail": 5}', "[" * 100_000, "\xff"])
@pytest.mark.parametrize("ending", ["json", "toml"])
def test_a_file_that_holds_no_incidents_is_refused(tmp_path, text, ending):
    """Whatever it holds."""
    file = tmp_path / f"health.{ending}"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="health"):
        health("--health", str(file))


def test_fewer_lines_of_lengths_repeat(tmp_path):
    """One entry for each micro-batch of each replica."""
    file = tmp_path / "lengths.jsonl"
    file.write_text("[60, 40]\n[100]\n\n[7]\n[1, 1]\n[5]\n")
    read = described.lengths_of(said("--lengths", str(file)), plan_of())
    assert read is not None
    assert len(read) == 12
    assert read[0] == read[5] == read[10] == Lengths(tokens=100, pairs=5200)
    assert described.lengths_of(said(), plan_of()) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "wanted are 1 to 12 lines"),
        ("[1]\n" * 13, "wanted are 1 to 12 lines"),
        ("[1]\n{}", "lengths.jsonl:2: no JSON list"),
        ("[]", "lengths.jsonl:1: a micro-batch has documents"),
        ("[0]", "lengths.jsonl:1: a micro-batch has documents"),
        ("[60, 41]", "lengths.jsonl:1: 101 tokens"),
    ],
)
def test_lengths_that_do_not_fit_the_plan_are_refused_with_their_line(tmp_path, text, message):
    """Too many micro-batches, or tokens."""
    file = tmp_path / "lengths.jsonl"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        described.lengths_of(said("--lengths", str(file)), plan_of())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (plan_of(), "cpu-box"),
        (plan_of(MODELS["llama2-13b"].shape, 4, 4, 2), "a100-32x8"),
        (plan_of(memory_bytes=80 << 30), "a100-32x8"),
        (plan_of(TINY, 8, 16, 4), "a100-2048x8"),
    ],
)
def test_the_default_cluster_is_the_smallest_preset_that_can_hold_the_job(plan, name):
    """Devices, and memory for what the plan says or the parameters need."""
    assert default_cluster(plan).cluster.name == name


def test_a_job_that_no_preset_can_hold_asks_for_a_description():
    """It says what the presets have."""
    with pytest.raises(UserError, match=r"no preset has 32768 devices.*--cluster"):
        default_cluster(plan_of(tp=8, pp=16, dp=256))


def test_a_cluster_with_too_few_devices_is_answered_with_enough():
    """The number of nodes that the mesh needs."""
    with pytest.raises(UserError, match=r"nearest valid: 33 nodes"):
        described.cluster_of("a100-32x8", 257)


def test_a_rate_that_no_link_has_is_refused(tmp_path):
    """With its line and what is wanted."""
    path = tmp_path / "slow.toml"
    path.write_text(
        '[cluster]\nname = "slow"\nnodes = 1\ngpus_per_node = 8\n'
        "[device]\nmemory_gib = 1\nbf16_tflops = 1\nfp32_tflops = 1\n"
        "[intra_node]\ngb_per_s = 1e-300\nlatency_us = 1\n"
        "[inter_node]\ngb_per_s = 1\nlatency_us = 1\n"
    )
    with pytest.raises(UserError, match=r"slow.toml:10: intra_node.gb_per_s = 1e-300"):
        described.cluster_of(str(path), 8)


def test_a_known_model_is_recognised_in_the_header_of_a_plan():
    """By name and shape, so that its biases count."""
    qwen = MODELS["qwen2.5-7b"]
    assert model_of_plan(plan_of(qwen.shape)) == qwen
    assert model_of_plan(plan_of(TINY)).shape == TINY


def test_a_config_file_is_called_like_its_directory(tmp_path):
    """Whose name may have characters that a plan has no room for."""
    folder = tmp_path / "My model (7B)"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert described.model_of(str(folder / "config.json")).shape.name == "My-model-7B"


def test_prices_follow_cluster_precision_and_health():
    """bf16 is as much faster as the device says; a slow rank slows its group."""
    plan = plan_of(MODELS["llama2-13b"].shape)
    low, high = (
        described.pricing_of(plan, said("--precision", precision, "--slow", "rank=3:0.5"))
        for precision in ("fp32", "bf16")
    )
    ratio = low.costs.layer[1][2].per_token_s / high.costs.layer[1][2].per_token_s
    assert ratio == pytest.approx(312 / 19.5)
    assert low.health.speed == {3: 0.5}
