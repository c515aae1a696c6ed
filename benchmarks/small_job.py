"""The job that the benchmarks run: TP 2 x PP 2 x DP 2 on Python's own sources, a tiny model."""

from __future__ import annotations

from pathlib import Path

WORLD = 8


def job_text(
    name: str, runs: Path, steps: int, *, schedule: str = "zb-h1", detect_within_s: float = 1.0
) -> str:
    """The job file."""
    return f"""
[job]
name = "{name}"
steps = {steps}
runs_dir = "{runs}"
detect_within_s = {detect_within_s}
[model]
hidden_size = 64
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 128
vocab_size = 258
[parallel]
tp = 2
pp = 2
dp = 2
schedule = "{schedule}"
[batch]
microbatches = 4
tokens = 64
[optimizer]
lr = 3e-3
warmup_steps = 2
"""
