"""Random failure states of real models on real clusters: ranks lost, devices and links slow."""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

from resihp.compiler.adaptation import Situation, adapt
from resihp.compiler.cluster import Cluster, Health, SlowLink, find_cluster
from resihp.compiler.costs import CostModel
from resihp.compiler.healthy import Recipe, healthy_plan
from resihp.compiler.models import find_model
from resihp.compiler.pricing import Pricing
from resihp.errors import NoFeasiblePlan
from resihp.ir.model import Batch, Mesh, Plan, Precision


class Job(NamedTuple):
    """A healthy job."""

    model: str
    tp: int
    pp: int
    dp: int
    microbatches: int
    schedule: str
    cluster: str = "a100-32x8"
    precision: Precision = "bf16"
    tokens: int = 4096
    memory_gib: int | None = None
    """Of a device; by default that of the cluster."""


JOBS = (
    Job("llama2-7b", 2, 2, 2, 8, "1f1b", "a100-2048x8"),
    Job("llama2-7b", 1, 4, 2, 8, "zb-h1"),
    Job("llama2-7b", 1, 4, 4, 6, "1f1b", "a100-2048x8"),
    Job("qwen2.5-7b", 2, 2, 4, 8, "zb-h1"),
    Job("llama2-13b", 4, 4, 2, 8, "1f1b", "a100-2048x8"),
    Job("llama2-13b", 4, 4, 2, 16, "zb-h1"),
    Job("llama2-13b", 2, 4, 4, 8, "zb-h1", "a100-2048x8"),
    Job("qwen2.5-14b", 4, 4, 4, 8, "1f1b"),
    Job("qwen2.5-32b", 4, 8, 2, 12, "zb-h1"),
    Job("qwen2.5-32b", 8, 4, 2, 8, "1f1b", "a100-2048x8"),
)

CHAINED = (
    Job("qwen2.5-7b", 2, 2, 3, 4, "zb-auto", tokens=2048),
    Job("qwen2.5-7b", 2, 3, 2, 8, "zb-auto", "a100-2048x8", tokens=2048),
    Job("llama2-7b", 2, 2, 4, 12, "zb-h2", "a100-2048x8", tokens=2048),
    Job("llama2-13b", 2, 3, 2, 6, "zb-h2", tokens=2048),
    Job("llama2-7b", 1, 4, 4, 4, "gpipe", tokens=2048),
    Job("llama2-7b", 2, 4, 2, 8, "zb-h1", precision="fp32", tokens=2048),
    Job("qwen2.5-14b", 4, 4, 3, 12, "zb-h1", precision="fp32", tokens=2048),
    Job("qwen2.5-14b", 4, 4, 2, 8, "1f1b", precision="fp32", tokens=2048, memory_gib=90),
    Job("llama2-7b", 2, 2, 4, 8, "zb-h1", tokens=2048, memory_gib=48),
)
"""Jobs that are adapted again and again: other schedules, fp32, little memory."""
_MOST_EVENTS = 3


def adapted_state(seed: str) -> Situation:
    """The state of `seed` in which a job is that was adapted up to some times before."""
    rng = random.Random(seed)
    job = rng.choice(CHAINED)
    cluster = find_cluster(job.cluster)
    plan = _plan(job)
    world = job.tp * job.pp * job.dp
    health = _health(rng, world, cluster)
    for _ in range(rng.randrange(_MOST_EVENTS)):
        try:
            plan = adapt(Situation(plan, _pricing(job, health))).plan
        except NoFeasiblePlan:
            break
        worse = _health(rng, world, cluster)
        lost = health.lost | worse.lost
        speed = {r: s for r, s in {**health.speed, **worse.speed}.items() if r not in lost}
        health = Health(lost=lost, speed=speed, links=worse.links)
    return Situation(plan, _pricing(job, health))


def failure_state(seed: str) -> Situation:
    """The state of `seed`: the same wherever it is made."""
    rng = random.Random(seed)
    job = rng.choice(JOBS)
    cluster = find_cluster(job.cluster)
    health = _health(rng, job.tp * job.pp * job.dp, cluster)
    return Situation(_plan(job), _pricing(job, health))


def _health(rng: random.Random, world: int, cluster: Cluster) -> Health:
    per_node = cluster.cluster.gpus_per_node
    lost = set(rng.sample(range(world), rng.choice((0, 0, 1, 1, 2, 3))))
    if world >= 4 * per_node and rng.random() < 0.1:
        node = rng.randrange(world // per_node)
        lost |= set(range(node * per_node, (node + 1) * per_node))
    slow = set(rng.sample(range(world), rng.choice((0, 1, 1, 2, 4)))) - lost
    links: tuple[SlowLink, ...] = ()
    num_nodes = world // per_node
    if num_nodes > 1 and rng.random() < 0.25:
        nodes = sorted(rng.sample(range(num_nodes), 2))
        delay_s = rng.choice((0.005, 0.03, 0.1))
        links = (SlowLink(nodes=(nodes[0], nodes[1]), delay_s=delay_s),)
    return Health(
        lost=frozenset(lost),
        speed={rank: rng.choice((0.2, 0.35, 0.5, 0.65, 0.8, 0.95)) for rank in sorted(slow)},
        links=links,
    )


@cache
def _plan(job: Job) -> Plan:
    device = find_cluster(job.cluster).device.memory_bytes
    recipe = Recipe(
        mesh=Mesh(tp=job.tp, pp=job.pp, dp=job.dp),
        batch=Batch(microbatches=job.microbatches, tokens=job.tokens),
        schedule=job.schedule,
        precision=job.precision,
        memory_bytes=device if job.memory_gib is None else job.memory_gib << 30,
    )
    return healthy_plan(recipe, _pricing(job, Health()))


def _pricing(job: Job, health: Health) -> Pricing:
    model, cluster = find_model(job.model), find_cluster(job.cluster)
    return Pricing(model.shape, _costs(job), cluster, health)


@cache
def _costs(job: Job) -> CostModel:
    model, cluster = find_model(job.model), find_cluster(job.cluster)
    return CostModel.of_description(model, cluster, precision=job.precision)


def told(situation: Situation) -> str:
    """The state in a line."""
    plan, health = situation.previous, situation.pricing.health
    mesh = plan.mesh
    parts = [f"{plan.model.name} tp={mesh.tp} pp={mesh.pp} dp={mesh.dp} {plan.schedule}"]
    parts += [f"lost {rank}" for rank in sorted(health.lost)]
    parts += [f"slow {rank}:{speed}" for rank, speed in health.speed.items()]
    parts += [f"link {link.nodes}+{link.delay_s}s" for link in health.links]
    return ", ".join(parts)
