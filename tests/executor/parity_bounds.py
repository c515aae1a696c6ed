"""How far a plan's training may be from that in one process, and why that far.

A plan does the same sums in single precision in another order; both it and a single-precision run
in one process are roundings of one exact result, made by equally many operations on the same
numbers. So the bound is measured, not guessed: the reference is trained exactly (fp64) and three
times in single precision, with its contractions split as TP 1, 2 and 4 split them. Whatever of a
tensor is farthest from the exact one in any of the three says what rounding does to this tensor
after these steps, with everything that amplifies it (ten updates, AdamW's division, clipping). A
plan mixes such orders over its groups, and its worst of some thousand elements is another draw of
about the same size: `SLACK` times the worst of three is allowed. Nothing is compared with a plan.

The bound would be worthless if AdamW could turn the rounding of a gradient near zero into a whole
step, as it does where `eps` is far below the gradients: update and gradient are as far apart as
1 / `eps` allows. With the `eps` of the grid they differ by about 1e-7 after ten steps, while one
percent too much in one tensor's gradient of one micro-batch of eight moves it a thousand times as
far (`test_parity` checks that such errors are seen).

Where no sum is split over a TP group the order of all additions is promised, and the bits have to
be those of the reference.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from cases import dataset_of
from parity_cases import GLOBAL_BATCH, MODELS, NUM_STEPS, TOKENS
from plain_training import EXACT, Arithmetic, Tensors, Trained, train

from resihp.config import (
    BatchConfig,
    JobConfig,
    JobSection,
    Numerics,
    OptimizerConfig,
    ParallelConfig,
)
from resihp.executor.data import Dataset
from resihp.executor.models import build_model
from resihp.executor.packing import Packing
from resihp.executor.sampler import GlobalBatches, Sampler
from resihp.ir.model import Mesh, Precision

SLACK = 4.0
SEED = 1
OPTIMIZER = OptimizerConfig(lr=5e-3, warmup_steps=3, eps=1e-5, grad_clip=1.0)
"""Gradients have norms of 0.7 to 2.2 in these ten steps: the first ones are clipped."""
_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SPLITS = (1, 2, 4)


class Bound(NamedTuple):
    """The exact result, and how far from it is allowed."""

    exact: Trained
    loss: float
    """Of every step's loss."""
    parameters: dict[str, float]
    """Of every element, by name of the tensor."""


def job_of(
    model: str, mesh: Mesh, numerics: Numerics = "bitwise", precision: Precision = "fp32"
) -> JobConfig:
    """The job of the grid on some mesh."""
    compute = msgspec.structs.replace(_DEFAULT_COMPUTE, numerics=numerics, precision=precision)
    return JobConfig(
        job=JobSection(name="parity", steps=NUM_STEPS, seed=SEED),
        model=MODELS[model],
        parallel=ParallelConfig(tp=mesh.tp, pp=mesh.pp, dp=mesh.dp),
        batch=BatchConfig(microbatches=GLOBAL_BATCH // mesh.dp, tokens=TOKENS),
        optimizer=OPTIMIZER,
        compute=compute,
    )


_DEFAULT_COMPUTE = JobConfig(
    job=JobSection(steps=1), model=MODELS["untied"], batch=BatchConfig(microbatches=1, tokens=1)
).compute


@cache
def _dataset() -> Dataset:
    """Documents of 5 to 150 bytes: windows with one segment and with many."""
    lengths = (5, 40, 0, 17, 90, 150, 3)
    texts = [bytes(33 + (7 * n + i * i) % 90 for i in range(n)) for n in lengths * 20]
    with tempfile.TemporaryDirectory() as directory:
        return dataset_of(Path(directory), texts)


def batches_of(num_replicas: int) -> GlobalBatches:
    """The global batches of the grid, dealt out to some replicas: always the same windows."""
    packing = Packing(_dataset(), TOKENS, SEED)
    sampler = Sampler(packing.num_windows, SEED)
    return GlobalBatches(packing, sampler, num_replicas, GLOBAL_BATCH // num_replicas)


def trained(
    model: str,
    arithmetic: Arithmetic,
    num_replicas: int = 1,
    spoil: Callable[[tuple[int, int], Tensors], None] | None = None,
) -> Trained:
    """The reference."""
    job = job_of(model, Mesh(tp=1, pp=1, dp=num_replicas))
    logical = build_model(job.model)
    names = logical.tensors(0, logical.num_layers - 1)
    initial = {name: logical.initial(name, SEED) for name in names}
    return train(job, batches_of(num_replicas), initial, arithmetic, NUM_STEPS, spoil)


@cache
def same_order(model: str, num_replicas: int) -> Trained:
    """The reference in single precision, in the order of additions that the executor promises."""
    return trained(model, Arithmetic(torch.float32), num_replicas)


@cache
def bound_of(model: str, precision: Precision = "fp32") -> Bound:
    """See above; for `bf16` the three runs compute F and B in it."""
    exact = _exact(model)
    rounded = [trained(model, Arithmetic(_DTYPES[precision], parts)) for parts in _SPLITS]
    losses = [
        abs(mine - right)
        for run in rounded
        for mine, right in zip(run.losses, exact.losses, strict=True)
    ]
    parameters = {
        name: SLACK * max(distance(run.parameters[name], right) for run in rounded)
        for name, right in exact.parameters.items()
    }
    return Bound(exact, SLACK * max(losses), parameters)


@cache
def _exact(model: str) -> Trained:
    return trained(model, EXACT)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Between the elements that are farthest apart."""
    return float((one.double() - other.double()).abs().max())
