"""A simulation in figures: what `resihp simulate` prints, and writes as JSON."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from resihp.compiler.costs import FittedCost
from resihp.compiler.device_memory import memory_warnings
from resihp.compiler.simulate.reduction import reduced_between_nodes
from resihp.compiler.simulate.result import GroupTime, Peak, Simulation
from resihp.ir.model import Group
from resihp.ir.statements import spell_instr, spell_numbers

__all__ = ["GroupReport", "LinkReport", "Report", "report_of"]


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """One TP group; bytes are those of one member."""

    group: str
    pp: int
    ranks: str
    layers: str
    tp: int
    busy_s: float
    """In F, B, W and BW."""
    bubble_s: float
    """Not in these, and not in `reduce_grads` or `step`."""
    utilisation: float
    """Share of the iteration that it is busy."""
    peak_bytes: int
    peak_at: str
    """The instruction during which memory is fullest; empty for a group that does nothing."""
    peak_at_s: float
    """When that starts."""


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """What goes from one node to another in one iteration."""

    source: int
    target: int
    num_bytes: int
    """Activations and their gradients."""
    reduced_bytes: int
    """Gradients of parameters, which replicas sum in rings."""
    share: float
    """Of the iteration, if all adapters of a node carried nothing else at full rate."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration."""

    cluster: str
    level: str
    iteration_s: float
    tokens_per_s: float
    compute_s: float
    """When the last compute ends."""
    utilisation: float
    """Mean over ranks in groups."""
    memory_bytes: int
    """Of a device, as the plan says, or else the cluster."""
    groups: tuple[GroupReport, ...]
    """Position by position."""
    links: tuple[LinkReport, ...]
    """Between different nodes, most bytes first."""
    fits: tuple[FittedCost, ...]
    """Of the prices that come from measurements."""
    warnings: tuple[str, ...]
    """Why the plan may not run on the cluster."""


def report_of(simulation: Simulation) -> Report:
    """All figures. Raises UserError where the memory of the plan cannot be told."""
    plan, cluster = simulation.plan, simulation.pricing.cluster
    times, peaks = simulation.groups(), simulation.peaks()
    num_ranks = sum(time.group.tp for time in times)
    busy_ranks = sum(time.group.tp * time.utilisation for time in times)
    return Report(
        cluster=cluster.cluster.name,
        level=str(plan.level),
        iteration_s=simulation.iteration_s,
        tokens_per_s=simulation.tokens_per_s,
        compute_s=simulation.compute_s,
        utilisation=busy_ranks / num_ranks,
        memory_bytes=plan.memory_bytes or cluster.device.memory_bytes,
        groups=tuple(_group(*both) for both in zip(times, peaks, strict=True)),
        links=_links(simulation),
        fits=simulation.pricing.costs.fits,
        warnings=memory_warnings(simulation),
    )


def _group(time: GroupTime, peak: Peak) -> GroupReport:
    group = time.group
    return GroupReport(
        group=str(group.name),
        pp=group.pp,
        ranks=spell_numbers(group.ranks),
        layers=_layers(group),
        tp=group.tp,
        busy_s=time.busy_s,
        bubble_s=time.bubble_s,
        utilisation=time.utilisation,
        peak_bytes=peak.num_bytes,
        peak_at="" if peak.instr is None else spell_instr(peak.instr),
        peak_at_s=peak.start_s,
    )


def _layers(group: Group) -> str:
    return ",".join(str(layers) for layers in group.layers)


def _links(simulation: Simulation) -> tuple[LinkReport, ...]:
    cluster = simulation.pricing.cluster
    per_second = cluster.inter_node.gb_per_s * 1e9 * cluster.cluster.nics_per_node
    sent = simulation.bytes_between_nodes()
    reduced = reduced_between_nodes(simulation.plan, simulation.pricing)
    links: Iterable[LinkReport] = (
        LinkReport(
            source=here,
            target=there,
            num_bytes=round(sent.get((here, there), 0.0)),
            reduced_bytes=round(reduced.get((here, there), 0.0)),
            share=(sent.get((here, there), 0.0) + reduced.get((here, there), 0.0))
            / per_second
            / simulation.iteration_s,
        )
        for here, there in sent.keys() | reduced.keys()
        if here != there
    )
    return tuple(sorted(links, key=_rank))


def _rank(link: LinkReport) -> tuple[int, int, int]:
    return -link.num_bytes - link.reduced_bytes, link.source, link.target
