"""The job file: what it says, what it refuses and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.compiler.schedules import placed
from resihp.config import (
    BatchConfig,
    ComputeConfig,
    DataConfig,
    DeviceConfig,
    Injection,
    JobConfig,
    JobSection,
    ModelConfig,
    ParallelConfig,
    RopeScaling,
    format_size,
    load,
    loads,
    parse_size,
    resolved,
)
from resihp.config.checks import nearest, problems
from resihp.config.schema import Numerics, Schedule
from resihp.errors import ConfigError, UserError
from resihp.ir.model import Precision

EXAMPLE = Path(__file__).parents[1] / "examples" / "stdlib.toml"

JOB = """\
[job]
steps = 60

[model]
hidden_size = 256
num_hidden_layers = 6
num_attention_heads = 8
num_key_value_heads = 2
intermediate_size = 688
vocab_size = 272

[parallel]
tp = 2
pp = 2
dp = 2
schedule = "zb-h1"

[batch]
microbatches = 4
tokens = 256

[optimizer]
lr = 3e-3

[device]
memory = "2GiB"

[[inject]]
rank = 5
step = 30
"""

SPLIT = (
    "num_attention_heads (8) and intermediate_size (688), and divides num_key_value_heads (2) or "
    "is a multiple of it"
)
LLAMA3 = '{ rope_type = "llama3", original_max_position_embeddings = 64'

# What the user wrote instead of a line of JOB, and what the user is told.
GOLDEN = [
    (
        "tp = 2",
        "tp = 3",
        f"job.toml:13: parallel.tp = 3: must be a power of two that divides {SPLIT}; "
        "nearest valid: 2",
    ),
    (
        "tp = 2",
        "tp = 16",
        f"job.toml:13: parallel.tp = 16: must be a power of two that divides {SPLIT}; "
        "nearest valid: 8",
    ),
    ("tp = 2", "tp = true", "job.toml:13: parallel.tp = true: expected int, got bool"),
    (
        "[device]",
        "[state]\nsnapshot_every = -1\n[device]",
        "job.toml:26: state.snapshot_every = -1: expected int >= 0; nearest valid: 0",
    ),
    (
        "[device]",
        '[state]\nsnapshot_every = "atuo"\n[device]',
        'job.toml:26: state.snapshot_every = "atuo": must be "auto" or a whole number; '
        "did you mean auto?",
    ),
    (
        "[device]",
        "[state]\nsnapshot_every = true\n[device]",
        "job.toml:26: state.snapshot_every = true: expected int, got bool",
    ),
    ("tp = 2", "tp = 0", "job.toml:13: parallel.tp = 0: expected int >= 1; nearest valid: 1"),
    (
        "pp = 2",
        "pp = 7",
        "job.toml:14: parallel.pp = 7: must be at most num_hidden_layers (6), a layer for each "
        "stage; nearest valid: 6",
    ),
    (
        "dp = 2",
        "dp = 300",
        "job.toml:15: parallel.dp = 300: makes 1200 ranks (tp * pp * dp), at most 1024 fit one "
        "machine; nearest valid: 256",
    ),
    (
        '"zb-h1"',
        '"zb-h3"',
        'job.toml:16: parallel.schedule = "zb-h3": must be "1f1b" or "zb-h1" or "zb-h2" or '
        '"zb-auto" or "gpipe" or "interleaved-1f1b" or "looped-bfs" or "zbv"; did you mean zb-h2?',
    ),
    (
        '"zb-h1"',
        '"zbv"\nstages_per_rank = 3',
        'job.toml:17: parallel.stages_per_rank = 3: must be 2 with schedule = "zbv"; '
        "nearest valid: 2",
    ),
    (
        '"zb-h1"',
        '"interleaved-1f1b"\nstages_per_rank = 4',
        "job.toml:17: parallel.stages_per_rank = 4: makes 8 stages of parallel.pp (2), and "
        "num_hidden_layers (6) is less than a layer for each; nearest valid: stages_per_rank = 3",
    ),
    (
        "steps = 60",
        "stepz = 60",
        "job.toml:2: job.stepz = 60: is no known key; did you mean steps?",
    ),
    ("steps = 60", "", "job.toml:1: job.steps: is missing"),
    ("steps = 60", 'steps = "sixty"', 'job.toml:2: job.steps = "sixty": expected int, got str'),
    ("[batch]", "[bach]", "job.toml:18: bach: is no known key; did you mean batch?"),
    (
        "[job]",
        "x = 1\n[job]",
        "job.toml:1: x = 1: is no known key; known here: job, model, parallel, batch, data, "
        "optimizer, compute, device, network, state, checkpoint, rejoin, inject",
    ),
    (
        "hidden_size = 256",
        "hidden_size = 250",
        "job.toml:5: model.hidden_size = 250: must be a multiple of 16, an even size for each of "
        "num_attention_heads (8); nearest valid: 256",
    ),
    (
        "num_key_value_heads = 2",
        "num_key_value_heads = 3",
        "job.toml:8: model.num_key_value_heads = 3: must divide num_attention_heads (8); "
        "nearest valid: 2",
    ),
    (
        "vocab_size = 272",
        "vocab_size = 272\ntie_word_embeddings = 0",
        "job.toml:11: model.tie_word_embeddings = 0: must be true or false; nearest valid: false",
    ),
    (
        "[model]",
        '[model]\nmodel_type = "qwen3"',
        'job.toml:5: model.model_type = "qwen3": must be "llama" or "qwen2"; did you mean qwen2?',
    ),
    (
        "[model]",
        '[model]\nmodel_type = "qwen2"\nattention_bias = true',
        'job.toml:6: model.attention_bias = true: is said of model_type = "llama" only; "qwen2" '
        "always has biases of queries, keys and values; nearest valid: false",
    ),
    (
        "[model]",
        '[model]\nrope_scaling = { rope_type = "dynamic", factor = 2.0 }',
        'job.toml:5: model.rope_scaling.rope_type = "dynamic": must be "default" or "linear" or '
        '"llama3" or "yarn"',
    ),
    (
        "[model]",
        '[model]\nrope_scaling = { rope_type = "yarn", factor = 4.0 }',
        "job.toml:5: model.rope_scaling: needs original_max_position_embeddings with rope_type = "
        '"yarn", the tokens of the context that the model was first trained with, as its '
        "config.json says",
    ),
    (
        "[model]",
        f"[model]\nrope_scaling = {LLAMA3}, low_freq_factor = 4.0 }}",
        "job.toml:5: model.rope_scaling.low_freq_factor = 4.0: must be below high_freq_factor "
        "(4.0); nearest valid: 2.0",
    ),
    (
        "[parallel]",
        '[model.rope_scaling]\nrope_type = "linear"\nfacter = 2.0\n[parallel]',
        "job.toml:14: model.rope_scaling.facter = 2.0: is no known key; did you mean factor?",
    ),
    (
        "[parallel]",
        "[model.rope_scaling]\nfactor = 2.0\n[parallel]",
        "job.toml:12: model.rope_scaling.rope_type: is missing",
    ),
    (
        "[model]",
        '[model]\nfactory = "nope"',
        'job.toml:5: model.factory = "nope": must be a module and a function in it, such as '
        "plain:transformer",
    ),
    (
        "tokens = 256",
        "tokens = 255",
        "job.toml:20: batch.tokens = 255: must be a multiple of parallel.tp (2), which cuts "
        "activations into as many chunks; nearest valid: 254",
    ),
    ("lr = 3e-3", "lr = nan", "job.toml:23: optimizer.lr = nan: expected float > 0.0"),
    (
        "lr = 3e-3",
        "warmup_steps = 61",
        "job.toml:23: optimizer.warmup_steps = 61: must be at most job.steps (60); "
        "nearest valid: 60",
    ),
    (
        '"2GiB"',
        '"2GB"',
        'job.toml:26: device.memory = "2GB": must be a whole number and KiB, MiB, GiB or TiB, '
        "such as 2GiB",
    ),
    (
        'memory = "2GiB"',
        'kind = "gpu"',
        'job.toml:26: device.kind = "gpu": must be "cpu" or "cuda" or "emulated"'
        "; did you mean cpu?",
    ),
    (
        "[device]",
        '[compute]\nprecision = "bf16"\nnumerics = "bitwise"\n[device]',
        'job.toml:27: compute.numerics = "bitwise": must be "fast" with precision = "bf16": plans '
        'count on one sum of gradients there; nearest valid: "fast"',
    ),
    (
        "[device]",
        "[compute]\nrecompute = 1\n[device]",
        "job.toml:26: compute.recompute = 1: must be true or false; nearest valid: true",
    ),
    (
        "rank = 5",
        "rank = 8",
        "job.toml:29: inject[0].rank = 8: must be below the number of ranks, tp * pp * dp = 8; "
        "nearest valid: 7",
    ),
    (
        "step = 30",
        'step = 30\nmoment = "votes"',
        'job.toml:31: inject[0].moment = "votes": must be "vote" or "voted" or "update" or '
        '"groups" or "state" or "joined"; did you mean vote?',
    ),
    (
        "step = 30",
        "step = 60",
        "job.toml:30: inject[0].step = 60: must be below job.steps (60); nearest valid: 59",
    ),
    (
        "step = 30",
        "step = 30\n[[inject]]\nrank = 5\nstep = 31\n[rejoin]\nrestarts = 0",
        "job.toml:32: inject[1].rank = 5: is killed by an earlier [[inject]] already",
    ),
    (
        "[device]",
        '[network]\nnodes = ["10.0.0.1", "10.0.0.2"]\nport = 29400\n[device]',
        "job.toml:26: network.nodes = ['10.0.0.1', '10.0.0.2']: is refused without "
        "network.secret_file, a file of mode 0600 that holds the job's secret on each node; "
        "nearest valid: name one, or leave [network] out, and everything stays on this machine's "
        "loopback interface",
    ),
    (
        "[device]",
        '[network]\nnodes = ["10.0.0.1"]\nsecret_file = "key"\n[device]',
        "job.toml:26: network.nodes = ['10.0.0.1']: needs network.port, where the monitor of each "
        "node listens; nearest valid: 29700",
    ),
    (
        "[device]",
        '[network]\nnodes = ["0.0.0.0"]\nport = 29400\nsecret_file = "key"\n[device]',
        "job.toml:26: network.nodes = ['0.0.0.0']: \"0.0.0.0\" stands for every interface; "
        'name the address of one, such as "127.0.0.1"',
    ),
    (
        "step = 30",
        "step = 30\n[[inject]]\nrank = 5\nstep = 30",
        "job.toml:32: inject[1].rank = 5: is killed in this step by an earlier [[inject]] already",
    ),
    (
        "step = 30",
        "",
        "job.toml:28: inject[0].step: is missing: where it strikes, or rate for random places",
    ),
    (
        "step = 30",
        "rate = 0.1\nstep = 30",
        "job.toml:31: inject[0].step = 30: is drawn with rate; leave one of the two out",
    ),
    (
        "step = 30",
        'step = 30\nkind = "stopp"',
        'job.toml:31: inject[0].kind = "stopp": must be "kill" or "stop" or "exit" or "exception" '
        'or "hold_gil" or "slow" or "slow_link" or "late_beats" or "lost_beats" or "full_disk" or '
        '"torn_checkpoint" or "kill_supervisor" or "kill_monitor" or "kill_coordinator" '
        'or "hang_monitor" or "hang_coordinator"; '
        "did you mean stop?",
    ),
    (
        "step = 30",
        'step = 30\nkind = "late_beats"\nshare = 0.5',
        'job.toml:32: inject[0].share = 0.5: is not said of kind = "late_beats", but of '
        'lost_beats; nearest valid: leave it out, or kind = "lost_beats"',
    ),
    (
        "step = 30",
        'step = 30\nkind = "hold_gil"',
        'job.toml:31: inject[0].kind = "hold_gil": needs lasts_s, for how long no other thread '
        "runs; nearest valid: lasts_s = 1",
    ),
    (
        "step = 30",
        'step = 30\ninstruction = 3\nmoment = "vote"',
        'job.toml:32: inject[0].moment = "vote": is said instead of instruction; leave one of the '
        "two out",
    ),
    ("[[inject]]", "[inject]", "job.toml:28: inject: must be tables, each written [[inject]]"),
    (
        "[job]",
        "[job",
        "job.toml: is not TOML: Expected ']' at the end of a table declaration "
        "(at line 1, column 5)",
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), GOLDEN, ids=[new for _, new, _ in GOLDEN])
def test_an_error_names_line_key_value_and_the_nearest_valid_choice(old, new, message):
    """One wrong line gives exactly this one message."""
    assert JOB.count(old) == 1 or old == "steps = 60"
    with pytest.raises(ConfigError) as caught:
        loads(JOB.replace(old, new, 1), path="job.toml")
    assert str(caught.value) == message


def test_a_key_written_inside_an_inline_table_has_no_line():
    """A position is given only where it is certain."""
    text = JOB.replace("[batch]\nmicrobatches = 4\ntokens = 256\n", "")
    with pytest.raises(ConfigError) as caught:
        loads(f"batch = {{ microbatches = 4, tokens = 255 }}\n{text}", path="job.toml")
    assert str(caught.value).startswith("job.toml: batch.tokens = 255: must be a multiple")


def test_a_file_that_is_not_there_is_named(tmp_path):
    """A missing job file is the user's fault and keeps its name."""
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
        load(tmp_path / "nowhere.toml")


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    """Binary files are told apart from TOML."""
    path = tmp_path / "job.toml"
    path.write_bytes(b"[job]\nname = '\xff'\n")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 14\)"):
        load(path)


def test_the_example_is_the_job_it_describes():
    """The shipped example loads: TP2 PP2 DP2, one kill half-way."""
    config = load(EXAMPLE)
    assert config.parallel == ParallelConfig(tp=2, pp=2, dp=2, schedule="zb-h1")
    assert config.parallel.world == 8
    assert config.inject == (Injection(rank=5, step=30),)
    assert config.model.head_dim == 32
    assert config.device.memory_bytes == 2 << 30


def test_the_example_of_qwen_has_more_members_than_key_value_heads():
    """What it is there to show."""
    config = load(EXAMPLE.with_name("qwen.toml"))
    assert config.parallel.tp > config.model.num_key_value_heads
    assert config.model.qkv_bias and config.model.tie_word_embeddings


def test_defaults_fill_what_is_not_said():
    """A job needs its steps, its model and its batch; the rest has defaults."""
    config = loads(JOB)
    assert config.job.detect_within_s == 1.0
    assert config.data.source == "stdlib"
    assert config.optimizer.beta2 == 0.95


@pytest.mark.parametrize(("precision", "numerics"), [("fp32", "bitwise"), ("bf16", "fast")])
def test_numerics_that_are_not_said_go_with_the_precision(precision, numerics):
    """Plans in bf16 count on one sum of gradients."""
    config = loads(f'{JOB}\n[compute]\nprecision = "{precision}"\n')
    assert config.compute.numerics == numerics
    assert loads(resolved(config)) == config


def test_a_config_says_what_a_plan_needs_of_it():
    """Model, degrees and batch are handed to the compiler under a plan's names."""
    config = loads(JOB)
    shape = config.model.shape("tiny")
    assert (shape.name, shape.layers, shape.kv_heads, shape.ffn) == ("tiny", 6, 2, 688)
    assert config.parallel.mesh().world == 8
    assert config.batch.batch().tokens == 256


@pytest.mark.parametrize("schedule", get_args(Schedule))
@pytest.mark.parametrize("said", [None, 1, 2, 3])
def test_stages_of_a_rank_are_those_that_the_compiler_knows(schedule, said):
    """What a schedule has where nothing is said, and what it cannot have."""
    config = loads(JOB)
    parallel = msgspec.structs.replace(config.parallel, schedule=schedule, stages_per_rank=said)
    found = list(problems(msgspec.structs.replace(config, parallel=parallel)))
    try:
        stages = placed(schedule, parallel.pp, said)
    except UserError:
        assert [problem.key for problem in found] == ["parallel.stages_per_rank"]
    else:
        assert not found
        assert sum(map(len, stages)) == parallel.num_stages


names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


scalings = st.builds(
    RopeScaling,
    rope_type=st.sampled_from(get_args(get_type_hints(RopeScaling)["rope_type"])),
    factor=st.floats(1.0, 64.0),
    original_max_position_embeddings=st.integers(1, 1 << 17),
    attention_factor=st.none() | st.floats(0.5, 2.0),
)


@st.composite
def configs(draw):
    """Any job that passes its checks."""
    tp = 1 << draw(st.integers(0, 2))
    pp, dp = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads = tp * draw(st.integers(1, 3))
    steps = draw(st.integers(1, 100))
    precision = draw(st.sampled_from(get_args(Precision)))
    world = tp * pp * dp
    ranks = draw(st.lists(st.integers(0, world - 1), unique=True, max_size=3))
    return JobConfig(
        job=JobSection(name=draw(names), steps=steps, runs_dir=draw(texts)),
        model=ModelConfig(
            hidden_size=heads * 16,
            num_hidden_layers=pp + draw(st.integers(0, 3)),
            num_attention_heads=heads * 2,
            num_key_value_heads=heads,
            intermediate_size=tp * draw(st.integers(1, 99)),
            vocab_size=272,
            rope_theta=draw(st.floats(1.0, 1e9)),
            rope_scaling=draw(st.none() | scalings),
            tie_word_embeddings=draw(st.booleans()),
            **draw(st.sampled_from([{"model_type": "qwen2"}, {"attention_bias": True}, {}])),
        ),
        parallel=ParallelConfig(tp=tp, pp=pp, dp=dp),
        batch=BatchConfig(microbatches=3, tokens=tp * draw(st.integers(1, 99))),
        data=DataConfig(source=draw(texts)),
        compute=ComputeConfig(
            precision=precision,
            numerics="fast" if precision == "bf16" else draw(st.sampled_from(get_args(Numerics))),
            recompute=draw(st.booleans()),
        ),
        device=DeviceConfig(memory=format_size(draw(st.integers(1 << 20, 1 << 40)))),
        inject=tuple(
            Injection(rank=rank, step=steps - 1, instruction=draw(st.none() | st.integers(0, 9)))
            for rank in ranks
        ),
    )


@given(configs())
def test_the_resolved_config_loads_to_itself(config):
    """What a run leaves behind starts the same run again."""
    assert list(problems(config)) == []
    assert loads(resolved(config)) == config


@given(st.integers(0, 1 << 50))
def test_a_size_round_trips_through_its_text(num_bytes):
    """Sizes are written exactly."""
    assert parse_size(format_size(num_bytes)) == num_bytes


def test_sizes_are_read_in_binary_units():
    """GiB is 2**30 bytes; plain numbers are bytes."""
    assert [parse_size(t) for t in ("2GiB", " 3 KiB ", "17", "17B")] == [2 << 30, 3 << 10, 17, 17]


@given(st.integers(-50, 50), st.sets(st.integers(-50, 50), min_size=1))
def test_nearest_has_no_closer_choice(value, choices):
    """The suggestion is the closest, the smaller of two."""
    best = nearest(value, choices)
    assert best is not None
    assert all(abs(best - value) <= abs(choice - value) for choice in choices)
    assert 2 * value - best not in choices or best <= value


@given(
    st.integers(1, 64), st.sampled_from([1, 2, 4, 6, 8, 12]), st.sampled_from([1, 2, 3, 4, 6, 8])
)
def test_the_suggested_tp_degree_is_accepted(tp, heads, kv_heads):
    """Following the message mends the file."""
    config = loads(JOB)
    model = msgspec.structs.replace(
        config.model,
        hidden_size=heads * 32,
        num_attention_heads=heads * kv_heads,
        num_key_value_heads=kv_heads,
    )
    parallel = msgspec.structs.replace(config.parallel, tp=tp)
    broken = msgspec.structs.replace(config, model=model, parallel=parallel)
    wanted = next((p.wanted for p in problems(broken) if p.key == "parallel.tp"), None)
    if wanted is None:
        assert tp & (tp - 1) == 0
        assert kv_heads % tp == 0 or tp % kv_heads == 0
        return
    mended = msgspec.structs.replace(parallel, tp=int(wanted.rpartition(" ")[2]))
    rest = problems(msgspec.structs.replace(broken, parallel=mended))
    assert not [p for p in rest if p.key == "parallel.tp"]
