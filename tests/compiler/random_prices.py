"""Random prices for random plans."""

from __future__ import annotations

import random

from resihp.compiler.cluster import Cluster, ClusterSize, Device, Health, Link, SlowLink
from resihp.compiler.costs import CostModel, Lengths, OpCost
from resihp.compiler.pricing import Pricing
from resihp.ir.model import Plan


def random_pricing(plan: Plan, rng: random.Random) -> Pricing:
    """Nodes of a few devices, some of them slow, some links slow, and costs of all kinds."""
    per_node = rng.choice((1, 2, 4, 8))
    num_nodes = plan.mesh.world // per_node + 1
    cluster = Cluster(
        cluster=ClusterSize(
            name="any", nodes=num_nodes, gpus_per_node=per_node, nics_per_node=rng.choice((1, 2))
        ),
        device=Device(
            memory_gib=1, bf16_tflops=1, fp32_tflops=1, memory_gb_per_s=rng.choice((None, 1.0))
        ),
        intra_node=Link(gb_per_s=1e-3, latency_us=10),
        inter_node=Link(gb_per_s=rng.choice((1e-4, 1e-3)), latency_us=100),
    )

    def cost() -> OpCost:
        return OpCost(*(rng.random() * scale for scale in (1e-4, 1e-5, 1e-4, 1e-5)))

    costs = CostModel(
        layer={tp: (cost(), cost(), cost()) for tp in (1, 2, 4)},
        head={tp: (cost(), cost(), cost()) for tp in (1, 2, 4)},
        boundary_bytes_per_token=32,
        layer_parameter_bytes=1000,
        table_parameter_bytes=100,
    )
    slow = rng.sample(range(plan.mesh.world), rng.randint(0, min(2, plan.mesh.world)))
    links = [
        SlowLink(nodes=(rng.randrange(num_nodes), rng.randrange(num_nodes)), factor=2, delay_s=1e-3)
        for _ in range(rng.randint(0, 2))
    ]
    health = Health(
        speed={rank: rng.choice((0.3, 0.5)) for rank in slow},
        links=tuple(link for link in links if link.nodes[0] != link.nodes[1]),
    )
    return Pricing(plan.model, costs, cluster, health)


def random_lengths(plan: Plan, rng: random.Random) -> list[Lengths]:
    count = rng.choice((1, 3, plan.mesh.dp * plan.batch.microbatches))
    return [Lengths.of(rng.randint(1, 9) for _ in range(3)) for _ in range(count)]
