"""The sections of the job file as data. Ranges of single values are here, the rest in `checks`.

`[model]` uses Hugging Face's names for a LLaMA or a Qwen2.5, so that a `config.json` reads the
same.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from resihp.config.injection import Injection
from resihp.config.sizes import parse_size
from resihp.ir.model import Batch, Mesh, ModelShape, Precision

__all__ = [
    "MAX_WORLD",
    "Auto",
    "BatchConfig",
    "CheckpointConfig",
    "ComputeConfig",
    "DataConfig",
    "DeviceConfig",
    "DeviceKind",
    "JobConfig",
    "JobSection",
    "ModelConfig",
    "NetworkConfig",
    "Numerics",
    "OptimizerConfig",
    "ParallelConfig",
    "RejoinConfig",
    "RopeScaling",
    "StateConfig",
]

MAX_WORLD = 1024
"""Most ranks of one job: each is a process of this machine."""

Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Index = Annotated[int, Meta(ge=0, le=1 << 24)]
Positive = Annotated[float, Meta(gt=0.0, le=1e12)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Auto = Literal["auto"]
Decay = Annotated[float, Meta(ge=0.0, lt=1.0)]
Degree = Annotated[int, Meta(ge=1, le=MAX_WORLD)]
Schedule = Literal[
    "1f1b",
    "zb-h1",
    "zb-h2",
    "zb-auto",
    "gpipe",
    "interleaved-1f1b",
    "looped-bfs",
    "zbv",
]
Numerics = Literal["bitwise", "fast"]
DeviceKind = Literal["cpu", "cuda", "emulated"]


class JobSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[job]`: how long it runs and where it writes."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
            description="at most 64 letters, digits, dots, dashes and underscores, and begin with "
            "a letter or digit",
        ),
    ] = "job"
    steps: Count
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    runs_dir: Annotated[str, Meta(min_length=1)] = "runs"
    detect_within_s: Annotated[float, Meta(ge=0.1, le=60.0)] = 1.0
    """A lost rank is known to all within this time; every other timeout is derived from it."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rope_scaling`: how rotary frequencies are stretched for a longer context."""

    rope_type: Literal["default", "linear", "llama3", "yarn"]
    factor: Annotated[float, Meta(ge=1.0, le=1e6)] = 1.0
    """How much longer the context is than the original one."""
    original_max_position_embeddings: Count | None = None
    """Tokens of the original context; llama3 and yarn need it."""
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    """llama3: what turns less often than `low` over the original context is divided by `factor`,
    what turns more often than `high` is left alone."""
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    """yarn: the same, with `beta_slow` as low and `beta_fast` as high."""
    attention_factor: Positive | None = None
    """yarn: factor on cosine and sine (None: 0.1 ln(factor) + 1)."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[model]`: a LLaMA or a Qwen2.5 by its Hugging Face field names."""

    model_type: Literal["llama", "qwen2"] = "llama"
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    intermediate_size: Count
    vocab_size: Annotated[int, Meta(ge=258, le=1 << 24)]
    """At least the 256 bytes and two marks."""
    rms_norm_eps: Annotated[float, Meta(gt=0.0, le=1.0)] = 1e-5
    rope_theta: Annotated[float, Meta(ge=1.0, le=1e12)] = 10000.0
    rope_scaling: RopeScaling | None = None
    initializer_range: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.02
    tie_word_embeddings: bool = False
    """Whether the head uses the embedding's table."""
    attention_bias: bool = False
    """llama: whether the four projections of attention have biases; qwen2 has them on three."""
    factory: (
        Annotated[
            str,
            Meta(
                pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
                description="a module and a function in it, such as plain:transformer",
            ),
        ]
        | None
    ) = None
    """module:function that makes the model instead; the sizes above are what plans know of it."""

    @property
    def qkv_bias(self) -> bool:
        """Whether the projections of queries, keys and values have biases."""
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def output_bias(self) -> bool:
        """Whether the projection of what attention mixed has one."""
        return self.attention_bias and self.model_type == "llama"

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def shape(self, name: str) -> ModelShape:
        """What a plan says of this model, called `name` there."""
        return ModelShape(
            name=name,
            layers=self.num_hidden_layers,
            hidden=self.hidden_size,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            ffn=self.intermediate_size,
            vocab=self.vocab_size,
        )


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[parallel]`: tensor, pipeline and data parallel degrees, and the pipeline schedule."""

    tp: Degree = 1
    pp: Degree = 1
    dp: Degree = 1
    schedule: Schedule = "1f1b"
    stages_per_rank: Annotated[int, Meta(ge=1, le=1 << 10)] | None = None
    """Pipeline stages of each rank (None: as many as the schedule has where nothing is said)."""
    plan: Annotated[str, Meta(min_length=1)] | None = None
    """File of the plan to begin with, instead of one that is made for these degrees."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def num_stages(self) -> int:
        """Pipeline stages of a replica."""
        usual = 2 if self.schedule in ("interleaved-1f1b", "looped-bfs", "zbv") else 1
        return self.pp * (self.stages_per_rank or usual)

    def mesh(self) -> Mesh:
        """The degrees as a plan says them."""
        return Mesh(tp=self.tp, pp=self.pp, dp=self.dp)


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[batch]`: the global batch is dp * microbatches * tokens tokens."""

    microbatches: Annotated[int, Meta(ge=1, le=4096)]
    """Per replica."""
    tokens: Count
    """Per micro-batch."""

    def batch(self) -> Batch:
        """The sizes as a plan says them."""
        return Batch(microbatches=self.microbatches, tokens=self.tokens)


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[data]`: text to train on."""

    source: Annotated[str, Meta(min_length=1)] = "stdlib"
    """`stdlib` (the sources of Python's standard library) or a directory."""


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[optimizer]`: AdamW with linear warm-up and cosine decay."""

    lr: Positive = 1e-3
    min_lr_ratio: Share = 0.1
    """The learning rate at the last step as a share of `lr`."""
    warmup_steps: Index = 0
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Meta(ge=0.0, le=1e3)] = 0.1
    grad_clip: Positive = 1.0
    """Largest norm of the whole gradient."""


class ComputeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[compute]`: how numbers are kept and summed."""

    precision: Precision = "fp32"
    """`bf16`: F and B read bf16 copies of fp32 parameters; moments and gradient sums stay fp32."""
    numerics: Numerics = "bitwise"
    """`bitwise`: sums in a fixed order, whoever computes what. `fast`: in the order of arrival.

    In bf16 it is `fast`, also where a job file does not say it.
    """
    recompute: bool = False
    """Whether B computes again what F made, which then is not kept.

    A `parallel.plan` has its own `recompute` line, and must have one; a CSV of torch gets it.
    """


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[device]`: what one rank has."""

    kind: DeviceKind = "cpu"
    memory: str = "2GiB"
    cluster: str | None = None
    """Of emulated devices: the preset that has their prices; None: `cpu-box`."""

    @property
    def memory_bytes(self) -> int:
        """Capacity that no rank's peak may pass."""
        return parse_size(self.memory)


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[network]`: the machines of the job; without it, this machine and its loopback interface."""

    nodes: tuple[Annotated[str, Meta(min_length=1, max_length=255)], ...] = ()
    """Address of each node, in the order of torchrun's node ranks."""
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    """Where the monitor of each node listens; needed with `nodes`."""
    secret_file: Annotated[str, Meta(min_length=1)] | None = None
    """A file with the job's secret, mode 0600, the same on all nodes; needed with `nodes`."""


class StateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[state]`: copies of the state beside that of the other replicas, and how it is compared."""

    snapshot_every: Annotated[int, Meta(ge=0, le=1 << 24)] | Auto = "auto"
    """Steps between two snapshots in shared memory; 0: none; "auto": as often as they cost next to
    nothing, and after every step where that is so."""
    buddy: bool = True
    """Whether a rank of another node keeps a copy of each snapshot, where there is one."""
    audit_every: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Steps between two comparisons of all replicas; 0: only after each recovery."""


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[checkpoint]`: versions of the state on disk."""

    dir: Annotated[str, Meta(min_length=1)] | None = None
    """Where they are; None: `checkpoints` in the run's directory."""
    every: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Steps between two; 0: only where the job ends before its last step."""
    keep: Annotated[int, Meta(ge=1, le=1 << 16)] = 2
    """How many complete ones stay."""
    resume: bool = False
    """Whether the job begins from the newest complete one in `dir`."""


class RejoinConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rejoin]`: whether lost ranks come back."""

    restarts: Annotated[int, Meta(ge=0, le=1 << 16)] = 3
    """How often an executor is started again without a step that it took part in; 0: never."""
    good_iterations: Count = 8
    """Iterations that a rank must be there again before the plan counts on it, doubled after
    each relapse."""


class JobConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole job file."""

    job: JobSection
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    compute: ComputeConfig = ComputeConfig()
    device: DeviceConfig = DeviceConfig()
    network: NetworkConfig = NetworkConfig()
    state: StateConfig = StateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rejoin: RejoinConfig = RejoinConfig()
    inject: tuple[Injection, ...] = ()
