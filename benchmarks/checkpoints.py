"""What a saved version costs: the copy that training waits for, the write beside it, the load.

    python benchmarks/checkpoints.py [--directory DIR] [--rounds N] [--mebibytes N ...]

One process plays the ranks of TP 2 x PP 2 x DP 2 in turn, on models whose whole state (parameters
and both moments) is about so many MiB. "copy" is what holds up the communication stream of the
rank with the largest share: the next vote waits for it, F and B do not. "write" is that rank's
part, hashed and synced, which a thread does; "complete" is the coordinator's: all manifests are
checked and the marker is written. "load" is one rank of TP 1 x PP 2 reading, hashing and cutting
its shards. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import torch
from options import at_least

from resihp.checkpoint.manifest import Manifest, PartFile, Position
from resihp.checkpoint.versions import complete, discard, version_name
from resihp.config import BatchConfig, JobConfig, JobSection, ModelConfig, ParallelConfig
from resihp.executor.adamw import AdamW
from resihp.executor.checkpoint.loading import load_holding
from resihp.executor.checkpoint.pieces import all_keys
from resihp.executor.checkpoint.saving import Division, write_part
from resihp.executor.layouts import local_shape
from resihp.executor.model import Model, tensors_of
from resihp.executor.models import build_model
from resihp.executor.state import Holding, holding_of
from resihp.ir.expand import expand
from resihp.ir.program import Program
from resihp.monitor.planner import Planner

T = TypeVar("T")
MIB = 2**20
LAYERS = 8
PARAMETERS_PER_LAYER = 12.5
"""As a multiple of the squared hidden size: attention 4, the three matrices of the MLP 8.5."""


class Times(NamedTuple):
    """Seconds of one round."""

    copy_s: float
    write_s: float
    complete_s: float
    load_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description="What a saved version costs.")
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: /tmp)")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--mebibytes", type=at_least(1), nargs="+", default=[16, 64, 256])
    args = parser.parse_args()
    print(f"{'state':>9} {'share':>9} {'copy':>22} {'write':>22} {'complete':>9} {'load':>22}")
    for mebibytes in args.mebibytes:
        measure(mebibytes, args.rounds, args.directory)


def measure(mebibytes: int, rounds: int, directory: Path | None) -> None:
    """Print the row of one size."""
    job = job_of(mebibytes)
    model = build_model(job.model)
    plan = Planner(job).initial().plan
    narrow = at_degrees(job, tp=1, pp=2, dp=1)
    program = expand(Planner(narrow).initial().plan, 0)
    division = Division(model, plan)
    sizes = {rank: share_bytes(division, rank) for rank in division.ranks}
    largest = max(sizes, key=lambda rank: sizes[rank])
    held = {rank: holding(model, job, expand(plan, rank)) for rank in division.ranks}
    times: list[Times] = []
    loaded = 0
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=directory) as path:
            one, loaded = round_of(model, job, division, held, largest, Path(path), number, program)
            times.append(one)
    medians = Times(*(statistics.median(each) for each in zip(*times, strict=True)))
    share, whole = sizes[largest], sum(sizes.values())
    print(
        f"{whole / MIB:5.0f} MiB {share / MIB:5.1f} MiB {told(medians.copy_s, share)} "
        f"{told(medians.write_s, share)} {1e3 * medians.complete_s:6.0f} ms "
        f"{told(medians.load_s, loaded)}",
        flush=True,
    )


def round_of(
    model: Model,
    job: JobConfig,
    division: Division,
    held: dict[int, Holding],
    largest: int,
    directory: Path,
    step: int,
    program: Program,
) -> tuple[Times, int]:
    """One version, saved, completed and loaded; the bytes that were loaded."""
    name = version_name(step, "benchmark", 1)
    spent = {"copy": 0.0, "write": 0.0}
    parts: list[PartFile] = []
    for rank in division.ranks:
        share = division.share(rank)
        copies, copy_s = timed(lambda share=share, rank=rank: share.copy(model, held[rank]))
        part, write_s = timed(
            lambda share=share, rank=rank, copies=copies: write_part(
                directory, name, rank, step, share, copies, all_keys(model)
            )
        )
        parts.append(part)
        if rank == largest:
            spent = {"copy": copy_s, "write": write_s}
    position = Position(dataset="", seed=0, tokens=64, num_microbatches=1)
    manifest = Manifest(
        step=step,
        updates=step,
        loss=None,
        position=position,
        run="benchmark",
        generation=1,
        parts=tuple(parts),
    )
    _, complete_s = timed(lambda: complete(directory, name, manifest))
    loaded, load_s = timed(lambda: load_holding(model, job.optimizer, program, directory / name))
    discard(directory, name)
    return Times(spent["copy"], spent["write"], complete_s, load_s), loaded.num_bytes


def timed(work: Callable[[], T]) -> tuple[T, float]:
    start_s = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start_s


def told(seconds: float, num_bytes: int) -> str:
    return f"{1e3 * seconds:7.1f} ms {num_bytes / MIB / seconds:5.0f} MiB/s"


def share_bytes(division: Division, rank: int) -> int:
    """Of what `rank` writes."""
    found = 0
    for item in division.share(rank).plan.items:
        assert item.tensor_data is not None
        found += 4 * item.tensor_data.chunk.sizes.numel()
    return found


def holding(model: Model, job: JobConfig, program: Program) -> Holding:
    """Random shards."""
    kinds = [
        {
            name: torch.rand(local_shape(model.layout(name), program.tp, program.tp_index))
            for name in tensors_of(model, program.layers)
        }
        for _ in range(3)
    ]
    parameters, exp_avg, exp_avg_sq = kinds
    return holding_of(
        program, AdamW(job.optimizer, parameters, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    )


def job_of(mebibytes: int) -> JobConfig:
    """A LLaMA whose parameters and moments take about so much."""
    hidden = round((mebibytes * MIB / 12 / LAYERS / PARAMETERS_PER_LAYER) ** 0.5 / 16) * 16
    return JobConfig(
        job=JobSection(name="benchmark", steps=1),
        model=ModelConfig(
            hidden_size=hidden,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=hidden * 17 // 6 // 2 * 2,
            vocab_size=512,
        ),
        parallel=ParallelConfig(tp=2, pp=2, dp=2),
        batch=BatchConfig(microbatches=2, tokens=64),
    )


def at_degrees(job: JobConfig, *, tp: int, pp: int, dp: int) -> JobConfig:
    """`job` at other degrees."""
    return msgspec.structs.replace(job, parallel=ParallelConfig(tp=tp, pp=pp, dp=dp))


if __name__ == "__main__":
    main()
