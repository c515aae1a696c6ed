"""RHP902: a group that computes so much more than the others that they wait for it.

The compute of a group is counted in units: the forward of one decoder layer on one rank is 1, as
are its B and its W, and BW is 2; a group of TP degree d does d units at a time. The output head
counts as as many layers as it has parameters. Attention over long sequences is not counted, nor
what devices really take: that needs measurements.

A group is reported above 1.25 times the mean of the other groups, since the others then do
nothing for a fifth of the time; and only where a single step, one micro-batch to another replica
or one layer to the stage next to it, makes the busiest of those concerned less busy. Layers
and micro-batches are whole, so less than that cannot be mended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from resihp.ir.diagnostics import Span
from resihp.ir.lanes import Lane
from resihp.ir.model import Group, GroupName, ModelShape
from resihp.ir.statements import spell_numbers
from resihp.ir.timeline import UNIT_COST
from resihp.ir.verify.findings import Findings
from resihp.ir.view import View

__all__ = ["check_balance"]

_FACTOR = 1.25


class _Load(NamedTuple):
    """What one group computes in an iteration."""

    group: Group
    passes: Mapping[int, float]
    """Units per layer, of each stage."""
    num_microbatches: int
    units: float
    """Over all its layers, divided by its TP degree."""


def check_balance(view: View, findings: Findings) -> None:
    """One finding per position and load, naming the groups that have it."""
    loads = _loads(view)
    if len(loads) < 2:
        return
    total = sum(load.units for load in loads.values())
    spans = {g.name: s for s, g in zip(view.parsed.groups, view.plan.groups, strict=True)}
    busy: dict[tuple[int, float, float, str], list[GroupName]] = defaultdict(list)
    for name, load in loads.items():
        mean = (total - load.units) / (len(loads) - 1)
        if load.units > _FACTOR * mean:
            step = next(_steps(view, loads, load), None)
            if step is not None:
                busy[name.pp, load.units, mean, step].append(name)
    for (pp, units, mean, step), names in busy.items():
        _report(pp, units, mean, step, sorted(names), spans, findings)


def _report(
    pp: int,
    units: float,
    mean: float,
    step: str,
    names: list[GroupName],
    spans: Mapping[GroupName, Span],
    findings: Findings,
) -> None:
    where = f"dp{spell_numbers([name.replica for name in names])}.pp{pp}"
    computes = "computes" if len(names) == 1 else "each compute"
    times = f"{units / mean:.3g} times the mean of the other groups" if mean else "the others none"
    findings.add(
        "RHP902",
        spans[names[0]],
        f"{where} {computes} {units:.4g} units per iteration, {times}",
        hint=step,
    )


def _loads(view: View) -> dict[GroupName, _Load]:
    """The load of every group that computes."""
    passes = {name: _passes(lane) for name, lane in view.lanes.items()}
    loads: dict[GroupName, _Load] = {}
    first_of = {member: first for first, members in view.alike.items() for member in members}
    for group in view.plan.groups:
        seen = GroupName(first_of.get(group.replica, group.replica), group.pp)
        if seen not in passes:
            continue
        of_stage, num_microbatches = passes[seen]
        units = sum(
            per_layer * _weight(view, stage) / group.tp for stage, per_layer in of_stage.items()
        )
        if units:
            loads[group.name] = _Load(group, of_stage, num_microbatches, units)
    return loads


def _passes(lane: Lane) -> tuple[Counter[int], int]:
    """Units per layer of each stage of a lane, and how many micro-batches it computes."""
    passes: Counter[int] = Counter()
    micro_batches: set[object] = set()
    for op, task in lane.first:
        if op.is_compute:
            passes[task.stage] += int(UNIT_COST[op])
            micro_batches.add(task.micro_batch)
    return passes, len(micro_batches)


def _weight(view: View, stage: int) -> float:
    """Layers of a stage, the head counted as layers."""
    layers = view.placement.layers[stage]
    head = _head_layers(view.plan.model) if stage == view.placement.num_stages - 1 else 0.0
    return layers.last - layers.first + 1 + head


def _head_layers(model: ModelShape) -> float:
    attention = 2 * model.hidden * model.hidden * (1 + model.kv_heads / model.heads)
    return model.vocab * model.hidden / (attention + 3 * model.hidden * model.ffn)


# --- steps that would help -------------------------------------------------------------------


def _steps(view: View, loads: Mapping[GroupName, _Load], busy: _Load) -> Iterator[str]:
    """What would make the busiest group concerned less busy, in words."""
    yield from _micro_batch_steps(loads, busy)
    yield from _layer_steps(view, loads, busy)


def _micro_batch_steps(loads: Mapping[GroupName, _Load], busy: _Load) -> Iterator[str]:
    if busy.num_microbatches < 2:
        return
    share = busy.units / busy.num_microbatches
    others = [load for load in loads.values() if load.group.pp == busy.group.pp]
    for other in sorted(others, key=lambda load: load.units):
        more = other.units + share * busy.group.tp / other.group.tp
        if more < busy.units and other is not busy:
            after = max(more, busy.units - share)
            yield (
                f"let replica {other.group.replica} run one of its micro-batches: the busier of "
                f"the two then computes {after:.4g} units"
            )


def _layer_steps(view: View, loads: Mapping[GroupName, _Load], busy: _Load) -> Iterator[str]:
    for stage in busy.passes:
        layers = view.placement.layers[stage]
        for target in (stage - 1, stage + 1):
            if layers.first == layers.last or not 0 <= target < view.placement.num_stages:
                continue
            pps = view.placement.pp[stage], view.placement.pp[target]
            if pps[0] == pps[1]:
                continue
            before = max(load.units for load in loads.values() if load.group.pp in pps)
            after = max(
                load.units + _change(load, stage, target)
                for load in loads.values()
                if load.group.pp in pps
            )
            if after < before:
                layer = layers.first if target < stage else layers.last
                yield (
                    f"give layer {layer} to stage {target} in every replica: the busiest group of "
                    f"the two positions then computes {after:.4g} units"
                )


def _change(load: _Load, stage: int, target: int) -> float:
    """What a layer that goes from `stage` to `target` changes for a group."""
    return (load.passes.get(target, 0.0) - load.passes.get(stage, 0.0)) / load.group.tp
