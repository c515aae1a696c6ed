"""A case of the parity grid, run: what all ranks came to against training in one process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import torch
from fleet import Fleet
from parity_bounds import Bound, bound_of, distance, job_of, same_order
from parity_cases import MODELS, NUM_STEPS, Case, Phase
from parity_crew import Stand, TrainTo, leave, train
from torch import Tensor

from resihp.compiler import facts_of
from resihp.executor.layouts import local_shard
from resihp.executor.models import build_model
from resihp.ir.model import Plan
from resihp.ir.parser import parse
from resihp.ir.placement import placement_of
from resihp.ir.printer import print_plan
from resihp.ir.verify import has_errors, verify
from resihp.wire.messages import Commit, StepRecord


class Result(NamedTuple):
    """How far a case is from the reference."""

    num_ranks: int
    """Of the plan with most."""
    loss_share: float
    """Farthest loss of any step, as a share of what is allowed."""
    parameter_share: float
    """The same of the parameters of all ranks."""
    worst: str
    """The tensor of that."""
    has_same_bits: bool | None
    """Whether losses and parameters are those of the reference in single precision, in the order
    of additions that is promised; None where no such order is (a sum is split over a TP group, or
    the numerics are `fast`)."""
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether the case passes."""
        return max(self.loss_share, self.parameter_share) <= 1.0 and self.has_same_bits is not False


def run_case(fleet: Fleet, case: Case) -> Result:
    """Run all plans of a case; raises what the fleet raises where one does not end well."""
    begin_s = time.monotonic()
    phases = [phase._replace(plan=_with_options(case, phase.plan)) for phase in case.make()]
    _verify(phases)
    fleet.forget()
    mesh = phases[0].plan.mesh
    job = job_of(case.model, mesh, case.numerics, case.precision)
    records: list[StepRecord] = []
    stands: dict[int, Stand] = {}
    previous: Plan | None = None
    base = 0
    commit = Commit(version=0, updates=0, record=None)
    for plan, num_steps in phases:
        order = TrainTo(job, len(records) + num_steps, previous, base, commit)
        ranks = sorted({*plan.active_ranks, *plan.standby})
        stands = fleet.run(plan, train, order, ranks=ranks)
        fleet.run(plan, leave, ranks=ranks)
        base = stands[ranks[0]].generation
        records += _agreed(plan, stands)
        assert len(records) == order.num_steps
        updates = sum(not record.skipped for record in records)
        commit = Commit(version=len(records), updates=updates, record=records[-1])
        previous = plan
    assert previous is not None
    assert len(records) == NUM_STEPS
    compared = _compared(case, bound_of(case.model, case.precision), records, stands)
    return compared._replace(
        num_ranks=max(len(phase.plan.active_ranks) for phase in phases),
        has_same_bits=_same_bits(case, phases, records, stands),
        seconds=time.monotonic() - begin_s,
    )


def _with_options(case: Case, plan: Plan) -> Plan:
    stages = tuple(range(placement_of(plan).num_stages)) if case.recompute else ()
    return msgspec.structs.replace(plan, precision=case.precision, recompute=stages)


def _verify(phases: list[Phase]) -> None:
    """What is not accepted would prove nothing."""
    previous: Plan | None = None
    for plan, _ in phases:
        findings = verify(parse(print_plan(plan)), previous=previous, facts=facts_of)
        assert not has_errors(findings), findings
        previous = plan


def _agreed(plan: Plan, stands: Mapping[int, Stand]) -> list[StepRecord]:
    """The records, which all active ranks must have alike, and equal shards when they joined."""
    first, *others = (stands[rank] for rank in plan.active_ranks)
    plain = [_without_times(record) for record in first.records]
    for stand in others:
        assert [_without_times(record) for record in stand.records] == plain
    hashes: dict[str, str] = {}
    for stand in (first, *others):
        for name, digest in stand.hashes.items():
            assert hashes.setdefault(name, digest) == digest, f"replicas differ in {name}"
    return first.records


def _without_times(record: StepRecord) -> StepRecord:
    return msgspec.structs.replace(record, duration_s=0.0)


def _compared(
    case: Case, bound: Bound, records: list[StepRecord], stands: Mapping[int, Stand]
) -> Result:
    losses = [abs(r.loss - right) for r, right in zip(records, bound.exact.losses, strict=True)]
    worst = (-1.0, "")
    for stand in stands.values():
        for name, mine, right in _pairs(case, stand, bound.exact.parameters):
            worst = max(worst, (distance(mine, right) / bound.parameters[name], name))
    return Result(0, max(losses) / bound.loss, *worst, has_same_bits=None, seconds=0.0)


def _same_bits(
    case: Case, phases: list[Phase], records: list[StepRecord], stands: Mapping[int, Stand]
) -> bool | None:
    is_split = any(group.tp > 1 for phase in phases for group in phase.plan.groups)
    if is_split or case.numerics != "bitwise":
        return None
    expected = same_order(case.model, phases[0].plan.mesh.dp)
    if [record.loss for record in records] != expected.losses:
        return False
    return all(
        torch.equal(mine, right)
        for stand in stands.values()
        for _, mine, right in _pairs(case, stand, expected.parameters)
    )


def _pairs(
    case: Case, stand: Stand, expected: Mapping[str, Tensor]
) -> list[tuple[str, Tensor, Tensor]]:
    """Every tensor of a rank and what it should be."""
    model = build_model(MODELS[case.model])
    return [
        (
            name,
            torch.from_numpy(mine),
            local_shard(model.layout(name), expected[name], stand.tp, stand.tp_index),
        )
        for name, mine in stand.parameters.items()
    ]
