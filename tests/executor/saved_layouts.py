"""Random layouts of the odd model, and versions of a known logical state saved from them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from layouts import SMALL, idle_plan, job_of
from odd_model import ODD, logical, shards
from torch import Tensor

from resihp.checkpoint.manifest import Manifest, PartFile, Position
from resihp.checkpoint.versions import complete, version_name
from resihp.executor.adamw import AdamW
from resihp.executor.checkpoint.pieces import all_keys
from resihp.executor.checkpoint.saving import Division, write_part
from resihp.executor.state import Holding, holding_of
from resihp.ir.expand import expand
from resihp.ir.model import Group, LayerRange, Mesh, Plan

MESH = Mesh(tp=8, pp=2, dp=2)
LAST = SMALL.num_hidden_layers - 1
CONFIG = job_of(MESH).optimizer
POSITION = Position(dataset="d", seed=0, tokens=64, num_microbatches=4)


def logical_state(seed: int) -> tuple[dict[str, Tensor], ...]:
    """Parameters and both moments; tied tables are equal, second moments are squares."""
    kinds = [logical(3 * seed + kind) for kind in range(3)]
    kinds[2] = {name: tensor.square() for name, tensor in kinds[2].items()}
    for kind in kinds:
        kind["head"] = kind["table"].clone()
    return tuple(kinds)


def held(plan: Plan, rank: int, state: tuple[Mapping[str, Tensor], ...], updates: int) -> Holding:
    program = expand(plan, rank)
    parameters, mean, mean_sq = (shards(program, kind) for kind in state)
    optimizer = AdamW(CONFIG, parameters, exp_avg=mean, exp_avg_sq=mean_sq, num_steps=updates)
    return holding_of(program, optimizer)


def random_layout(chosen: random.Random, max_tp: int = 8) -> Plan:
    """Any degrees, one or two replicas, two positions of one or two stages each."""
    num_stages = chosen.choice([1, 2, 2, 4])
    bounds = [-1, *sorted(chosen.sample(range(LAST), num_stages - 1)), LAST]
    stages = [LayerRange(first + 1, last) for first, last in pairwise(bounds)]
    layers = [(stage,) for stage in stages]
    if num_stages == 4:  # looped
        layers = [(stages[0], stages[2]), (stages[1], stages[3])]
    ranks = list(range(MESH.world))
    chosen.shuffle(ranks)
    groups: list[Group] = []
    for replica in range(chosen.choice([1, 2])):
        for pp, held_layers in enumerate(layers):
            tp = chosen.choice([degree for degree in (1, 2, 4, 8) if degree <= max_tp])
            members, ranks = tuple(ranks[:tp]), ranks[tp:]
            groups.append(Group(replica=replica, pp=pp, ranks=members, layers=held_layers))
    return idle_plan(MESH, groups)


def save(
    directory: Path,
    plan: Plan,
    state: tuple[Mapping[str, Tensor], ...],
    *,
    step: int = 7,
    updates: int = 6,
    run: str = "run",
    generation: int = 1,
    alive: list[int] | None = None,
) -> Path:
    """A complete version, written by all ranks that are alive."""
    name = version_name(step, run, generation)
    division = Division(ODD, plan, alive)
    parts: list[PartFile] = []
    for rank in division.ranks:
        share = division.share(rank)
        copies = share.copy(ODD, held(plan, rank, state, updates))
        parts.append(write_part(directory, name, rank, step, share, copies, all_keys(ODD)))
    complete(directory, name, manifest_of(parts, step=step, updates=updates, run=run))
    return directory / name


def manifest_of(parts: list[PartFile], *, step: int, updates: int, run: str = "run") -> Manifest:
    return Manifest(
        step=step,
        updates=updates,
        loss=None,
        position=POSITION,
        run=run,
        generation=1,
        parts=tuple(parts),
    )
