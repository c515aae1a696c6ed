"""Whether the devices of a cluster have the memory that a plan counts on."""

from __future__ import annotations

from resihp.compiler.cluster import Cluster
from resihp.compiler.simulate import Simulation
from resihp.ir.verify.memory import readable_bytes

__all__ = ["memory_warnings"]


def memory_warnings(simulation: Simulation) -> tuple[str, ...]:
    """One sentence where a device has less than the plan needs, or else than it states.

    Raises UserError where the memory of the plan cannot be told.
    """
    cluster, stated = simulation.pricing.cluster, simulation.plan.memory_bytes
    there = cluster.device.memory_bytes
    if stated is not None and stated <= there:
        return ()
    fullest = max(simulation.peaks(), key=lambda peak: peak.num_bytes)
    if fullest.num_bytes > there:
        needed = f"{fullest.group.name} needs {readable_bytes(fullest.num_bytes)}"
        return (f"{_has(cluster)} and {needed}: the plan cannot run there",)
    if stated is None:
        return ()
    return (f"{_has(cluster)} and the plan states {readable_bytes(stated)}",)


def _has(cluster: Cluster) -> str:
    return f"a device of {cluster.cluster.name} has {readable_bytes(cluster.device.memory_bytes)}"
