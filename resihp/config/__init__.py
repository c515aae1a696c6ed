"""The job file: what a training job is, written in TOML by the operator.

    config = load("examples/stdlib.toml")
    config.parallel.world        # 8
    print(resolved(config))      # every key with its value, defaults filled in; loads again

`[model]` has the keys of a Hugging Face `config.json`, or names such a file: `config = "…"`.
A file that is wrong gives one `ConfigError`: the line, the dotted key, the value, what is wanted
and the nearest valid choice.
"""

from __future__ import annotations

from resihp.config.injection import (
    FAULT_KINDS,
    FaultKind,
    Injection,
    Moment,
    lasting_kinds,
    said_only_of,
)
from resihp.config.reading import load, loads
from resihp.config.schema import (
    BatchConfig,
    CheckpointConfig,
    ComputeConfig,
    DataConfig,
    DeviceConfig,
    DeviceKind,
    JobConfig,
    JobSection,
    ModelConfig,
    NetworkConfig,
    Numerics,
    OptimizerConfig,
    ParallelConfig,
    RejoinConfig,
    RopeScaling,
    StateConfig,
)
from resihp.config.sizes import format_size, parse_size
from resihp.config.toml import place_of
from resihp.config.writing import resolved

__all__ = [
    "FAULT_KINDS",
    "BatchConfig",
    "CheckpointConfig",
    "ComputeConfig",
    "DataConfig",
    "DeviceConfig",
    "DeviceKind",
    "FaultKind",
    "Injection",
    "JobConfig",
    "JobSection",
    "ModelConfig",
    "Moment",
    "NetworkConfig",
    "Numerics",
    "OptimizerConfig",
    "ParallelConfig",
    "RejoinConfig",
    "RopeScaling",
    "StateConfig",
    "format_size",
    "lasting_kinds",
    "load",
    "loads",
    "parse_size",
    "place_of",
    "resolved",
    "said_only_of",
]
