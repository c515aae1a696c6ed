"""The paper's layouts beside the best that the search finds for the same devices and batch.

The paper (section 8.1) trains with TP 4, DP 2 and PP 2, 4 or 8, and says nothing of micro-batches:
64 sequences of 4,096 tokens are assumed, one in a micro-batch.
"""

from __future__ import annotations

import time

from result_file import Row, print_table

from resihp.compiler.cluster import CLUSTERS, Health
from resihp.compiler.costs import CostModel
from resihp.compiler.degrees import Job, search
from resihp.compiler.healthy import Recipe, healthy_plan
from resihp.compiler.models import MODELS
from resihp.compiler.prediction import predict
from resihp.compiler.pricing import Pricing
from resihp.ir.model import Batch, Mesh

TP, DP = 4, 2
PP = {
    "llama2-7b": 2,
    "llama2-13b": 4,
    "llama2-34b": 8,
    "qwen2.5-7b": 2,
    "qwen2.5-14b": 4,
    "qwen2.5-32b": 8,
}
GLOBAL_BATCH, TOKENS = 64, 4096
LARGE = {"llama2-70b, 256": ("a100-32x8", 512), "llama2-70b, 16384": ("a100-2048x8", 4096)}
"""Without a layout of the paper: cluster and global batch."""


def main() -> None:
    """Print the tables."""
    cluster = CLUSTERS["a100-32x8"]
    rows: dict[str, Row] = {}
    for name, pp in PP.items():
        pricing = pricing_of(name, "a100-32x8")
        mesh = Mesh(tp=TP, pp=pp, dp=DP)
        recipe = Recipe(
            mesh=mesh,
            batch=Batch(microbatches=GLOBAL_BATCH // DP, tokens=TOKENS),
            precision="bf16",
            memory_bytes=cluster.device.memory_bytes,
        )
        papers = predict(healthy_plan(recipe, pricing), MODELS[name], pricing)
        found = searched(name, "a100-32x8", mesh.world, GLOBAL_BATCH)
        rows[f"{name}, {mesh.world}"] = {
            "paper's": f"tp {TP} pp {pp} dp {DP} 1f1b",
            "paper's s": papers.iteration_s,
            **found,
        }
    print_table("The paper's layouts, and the search's; the number is that of devices", rows)
    large: dict[str, Row] = {}
    for label, (preset, batch) in LARGE.items():
        devices = CLUSTERS[preset].num_devices
        large[label] = searched(label.partition(",")[0], preset, devices, batch)
    print_table("Large jobs", large)


def pricing_of(name: str, preset: str) -> Pricing:
    model, cluster = MODELS[name], CLUSTERS[preset]
    return Pricing(model.shape, CostModel.of_description(model, cluster), cluster, Health())


def searched(name: str, preset: str, num_devices: int, global_batch: int) -> Row:
    """The best layout of a job, and what it took to find it."""
    job = Job(
        num_devices=num_devices,
        global_batch=global_batch,
        sequence_tokens=TOKENS,
        memory_bytes=CLUSTERS[preset].device.memory_bytes,
        fewest_replicas=2,
    )
    started = time.process_time()
    result, _ = search(job, MODELS[name], pricing_of(name, preset))
    elapsed_s = time.process_time() - started
    best = result.choices[0]
    return {
        "found": f"tp {best.tp} pp {best.pp} dp {best.dp} {best.schedule}, "
        f"{best.microbatches} x {best.sequences}",
        "found s": best.prediction.iteration_s,
        "bubble %": 100 * best.prediction.bubble_share,
        "ways": result.num_candidates,
        "drafts": result.num_drafts,
        "plans": len(result.choices),
        "CPU s": elapsed_s,
    }


if __name__ == "__main__":
    main()
