"""Random failure states of real models on real clusters: ranks lost, devices and links slow."""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

from resihp.compiler.adaptation import Situation
from resihp.compiler.cluster import Cluster, Health, SlowLink, find_cluster
from resihp.compiler.costs import CostModel
from resihp.compiler.healthy import Recipe, healthy_plan
from resihp.compiler.models import find_model
from resihp.compiler.pricing import Pricing
from resihp.ir.model import Batch, Mesh, Plan


class Job(NamedTuple):
    """A healthy job."""

    model: str
    tp: int
    pp: int
    dp: int
    microbatches: int
    schedule: str
    cluster: str = "a100-32x8"


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
    recipe = Recipe(
        mesh=Mesh(tp=job.tp, pp=job.pp, dp=job.dp),
        batch=Batch(microbatches=job.microbatches, tokens=4096),
        schedule=job.schedule,
        precision="bf16",
        memory_bytes=find_cluster(job.cluster).device.memory_bytes,
    )
    return healthy_plan(recipe, _pricing(job, Health()))


def _pricing(job: Job, health: Health) -> Pricing:
    model, cluster = find_model(job.model), find_cluster(job.cluster)
    return Pricing(model.shape, _costs(job), cluster, health)


@cache
def _costs(job: Job) -> CostModel:
    return CostModel.of_description(find_model(job.model), find_cluster(job.cluster))


def told(situation: Situation) -> str:
    """The state in a line."""
    plan, health = situation.previous, situation.pricing.health
    mesh = plan.mesh
    parts = [f"{plan.model.name} tp={mesh.tp} pp={mesh.pp} dp={mesh.dp} {plan.schedule}"]
    parts += [f"lost {rank}" for rank in sorted(health.lost)]
    parts += [f"slow {rank}:{speed}" for rank, speed in health.speed.items()]
    parts += [f"link {link.nodes}+{link.delay_s}s" for link in health.links]
    return ", ".join(parts)
