"""Plans whose groups are given by hand, over one small model, and logical tensors to cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from cases import TINY
from torch import Tensor

from resihp.compiler import lower, ordered, spread_work
from resihp.config import BatchConfig, JobConfig, JobSection, ModelConfig, ParallelConfig
from resihp.executor.layouts import local_shard
from resihp.executor.model import tensors_of
from resihp.executor.models import build_model
from resihp.ir.model import Batch, Group, LayerRange, Mesh, Plan, Reshard, Stream
from resihp.ir.program import Program

SMALL: ModelConfig = msgspec.structs.replace(
    TINY, hidden_size=16, num_key_value_heads=4, intermediate_size=24, vocab_size=258
)
MODEL = build_model(SMALL)
KINDS = ("parameters", "exp_avg", "exp_avg_sq")


def job_of(mesh: Mesh, num_microbatches: int = 2, steps: int = 10) -> JobConfig:
    return JobConfig(
        job=JobSection(name="small", steps=steps),
        model=SMALL,
        parallel=ParallelConfig(tp=mesh.tp, pp=mesh.pp, dp=mesh.dp),
        batch=BatchConfig(microbatches=num_microbatches, tokens=64),
    )


def plan_of(
    mesh: Mesh,
    groups: Sequence[Group],
    *,
    num_microbatches: int = 2,
    reconfigure: Sequence[Reshard] = (),
    lost: Sequence[int] = (),
    standby: Sequence[int] = (),
) -> Plan:
    """A plan of whatever groups; replicas without groups are dropped, their work is spread."""
    kept = sorted({group.replica for group in groups})
    work = spread_work(kept, mesh.dp, num_microbatches)
    plan = Plan(
        model=SMALL.shape("small"),
        mesh=mesh,
        batch=Batch(microbatches=num_microbatches, tokens=64),
        groups=tuple(groups),
        streams=(),
        standby=tuple(standby),
        lost=tuple(lost),
        reconfigure=tuple(reconfigure),
    )
    return lower(ordered(plan, "1f1b", work))


def idle_plan(
    mesh: Mesh,
    groups: Sequence[Group],
    *,
    reconfigure: Sequence[Reshard] = (),
    lost: Sequence[int] = (),
    standby: Sequence[int] = (),
) -> Plan:
    """A layout in which nothing runs, of groups with any number of stages."""
    return Plan(
        model=SMALL.shape("small"),
        mesh=mesh,
        batch=Batch(microbatches=1, tokens=64),
        groups=tuple(groups),
        streams=tuple(Stream(replicas=(g.replica,), pp=g.pp, body=()) for g in groups),
        standby=tuple(standby),
        lost=tuple(lost),
        reconfigure=tuple(reconfigure),
    )


def one_stage(degrees: Mapping[int, int], num_replicas: int, num_microbatches: int) -> Plan:
    """One stage with all layers; TP degree by replica, those that are missing are dropped."""
    tp = max(degrees.values())
    mesh = Mesh(tp=tp, pp=1, dp=num_replicas)
    layers = LayerRange(0, SMALL.num_hidden_layers - 1)
    groups = [
        Group(
            replica=replica,
            pp=0,
            ranks=tuple(range(replica * tp, replica * tp + degree)),
            layers=(layers,),
        )
        for replica, degree in degrees.items()
    ]
    return plan_of(mesh, groups, num_microbatches=num_microbatches)


def logical_tensors(seed: int, scale_by_magnitude: bool = False) -> dict[str, Tensor]:
    """Random whole tensors of the model; with magnitudes that make additions round."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name in MODEL.tensors(0, MODEL.num_layers - 1):
        shape = MODEL.layout(name).shape
        tensors[name] = torch.empty(shape).normal_(generator=generator)
        if scale_by_magnitude:
            tensors[name] *= 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    return tensors


def shards_of(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the rank of `program` holds of the logical `tensors`."""
    return {
        name: local_shard(MODEL.layout(name), tensors[name], program.tp, program.tp_index)
        for name in tensors_of(MODEL, program.layers)
    }
