"""What a plan is priced with where nobody says more: its own model, and the smallest cluster."""

from __future__ import annotations

from resihp.compiler.cluster import CLUSTERS, Cluster, Health
from resihp.compiler.costs import CostModel, Precision
from resihp.compiler.models import MODELS, Model
from resihp.compiler.pricing import Pricing
from resihp.errors import NoFeasiblePlan, UserError
from resihp.ir.model import Mesh, Plan
from resihp.ir.verify.memory import readable_bytes

__all__ = ["default_cluster", "model_of_plan", "pricing_of_plan", "smallest_cluster"]

_STATE_BYTES_PER_PARAMETER = 16
"""fp32 parameters, gradients and two moments: what a device must hold at the very least."""


def pricing_of_plan(
    plan: Plan,
    health: Health,
    cluster: Cluster | None = None,
    precision: Precision | None = None,
) -> Pricing:
    """Prices from the FLOPs of the plan's model; `precision` counts over that of the plan."""
    cluster = default_cluster(plan) if cluster is None else cluster
    costs = CostModel.of_description(
        model_of_plan(plan),
        cluster,
        precision=precision or plan.precision,
        max_tp=plan.mesh.tp,
    )
    return Pricing(plan.model, costs, cluster, health)


def model_of_plan(plan: Plan) -> Model:
    """The model of a plan's header; a known one by its name and shape."""
    known = MODELS.get(plan.model.name)
    return known if known is not None and known.shape == plan.model else Model(shape=plan.model)


def default_cluster(plan: Plan) -> Cluster:
    """The smallest preset that can hold the job of `plan`.

    A device needs the memory that the plan states, or else room for its share of the parameters,
    gradients and moments. Raises UserError where no preset has enough devices or as much memory as
    the plan states, NoFeasiblePlan where none of them holds the share.
    """
    return smallest_cluster(model_of_plan(plan), plan.mesh, plan.memory_bytes)


def smallest_cluster(model: Model, mesh: Mesh, memory_bytes: int | None) -> Cluster:
    """As `default_cluster`, for a job that has no plan yet."""
    share = _STATE_BYTES_PER_PARAMETER * model.num_parameters
    needed_bytes = memory_bytes or share // max(mesh.tp * mesh.pp, 1)
    by_size = sorted(CLUSTERS.values(), key=lambda cluster: cluster.num_devices)
    for cluster in by_size:
        if cluster.num_devices >= mesh.world and cluster.device.memory_bytes >= needed_bytes:
            return cluster
    devices = f"{mesh.world} device{'' if mesh.world == 1 else 's'}"
    presets = ", ".join(
        f"{each.cluster.name}: {each.num_devices} of {each.device.memory_gib:g} GiB"
        for each in by_size
    )
    most_bytes = max(cluster.device.memory_bytes for cluster in by_size)
    if memory_bytes is None and needed_bytes > most_bytes:
        raise NoFeasiblePlan(
            f"parameters, gradients and moments of {model.shape.name} take "
            f"{readable_bytes(needed_bytes)} on each of {devices} and no preset has as much "
            f"({presets}); a larger tp or pp needs less, or name a --cluster"
        )
    raise UserError(
        f"no preset has {devices} of {readable_bytes(needed_bytes)} ({presets}): describe the "
        f"cluster in TOML and name it with --cluster"
    )
