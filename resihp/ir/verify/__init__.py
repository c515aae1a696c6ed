"""The verifier: everything that is wrong with a plan, in one run.

Areas run from the ground up (ranges, topology, exactly once, data flow, channel order, progress,
memory, gradients, adaptation). A later area leaves alone what an earlier one has reported, so
one mistake gives few findings; none of them crashes on a broken plan. A schedule names no
transfers, no reduction and no step, so what is proved about them is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from resihp.ir.diagnostics import Diagnostic, Severity
from resihp.ir.facts import Facts
from resihp.ir.lanes import Lane, alike, lanes_of
from resihp.ir.model import GroupName, Level, Plan
from resihp.ir.placement import placement_of
from resihp.ir.source import Parsed
from resihp.ir.transport import EDGE, TRANSPORTS, Transport, parse_transport
from resihp.ir.verify.adaptation import check_adaptation, check_targets
from resihp.ir.verify.channels import check_channels
from resihp.ir.verify.dataflow import check_dataflow
from resihp.ir.verify.findings import Findings
from resihp.ir.verify.gradients import check_gradients
from resihp.ir.verify.memory import check_memory
from resihp.ir.verify.once import check_once
from resihp.ir.verify.pairs import check_pairs
from resihp.ir.verify.params import check_params
from resihp.ir.verify.progress import check_progress
from resihp.ir.verify.ranges import check_ranges, check_sizes
from resihp.ir.verify.report import Report
from resihp.ir.verify.topology import check_topology

__all__ = ["TRANSPORTS", "check_transport", "has_errors", "verify"]

_BOUNDARY_ELEMENT_BYTES = 4
"""Activations and their gradients cross stages in float32."""


def check_transport(name: str) -> None:
    """Raise `UserError` unless progress can be proved under the transport `name`."""
    parse_transport(name)


def verify(
    parsed: Parsed,
    *,
    previous: Plan | None = None,
    facts: Facts | Callable[[Plan], Facts] | None = None,
    transport: str | None = None,
) -> list[Diagnostic]:
    """Every finding about a plan, by place; empty for a plan that may run.

    `previous` is the plan that ran before: with it the reconfiguration is checked. `facts` are the
    sizes that the memory check needs, or a function that derives them from the plan (called only
    if the layout is sound); memory is checked if the plan also has a memory line. Progress is
    proved under `transport` (see `resihp.ir.transport`), or else under the one that the plan
    names, or else under `edge`; what crosses stages has the `boundary_bytes` of the facts, and
    without facts tokens * hidden * 4.

    Raises `UserError` for an unknown transport.
    """
    named = parsed.plan.transport if transport is None else transport
    proved_under = EDGE if named is None else parse_transport(named)
    return _verify(parsed, previous, facts, proved_under, look_for_swaps=True)


def _verify(
    parsed: Parsed,
    previous: Plan | None,
    facts: Facts | Callable[[Plan], Facts] | None,
    transport: Transport,
    *,
    look_for_swaps: bool,
) -> list[Diagnostic]:
    findings = Findings()
    check_sizes(parsed, findings)
    if len(findings):
        return findings.sorted()
    placement = placement_of(parsed.plan)
    check_ranges(parsed, placement, findings)
    check_topology(parsed, findings)
    sound = not findings.has("RHP1", "RHP2")
    needed = sound and (parsed.plan.memory_bytes is not None or transport.kind == "eager")
    known = _known(facts, parsed.plan) if needed else None
    findings.alike = alike(parsed.plan)
    lanes = lanes_of(parsed.plan, findings.alike)
    report = Report(parsed, findings)
    check_pairs(lanes, report)
    work = check_once(lanes, report)
    check_channels(check_dataflow(lanes, work, report), report)
    check_params(lanes, report)
    sizes = _boundary_bytes(parsed.plan, lanes, known) if transport.kind == "eager" else None
    again = partial(_verify, previous=None, facts=known, transport=transport, look_for_swaps=False)
    check_progress(parsed, lanes, transport, sizes, findings, again if look_for_swaps else None)
    check_gradients(parsed, placement, findings)
    if known is not None and parsed.plan.memory_bytes is not None:
        check_memory(parsed, lanes, known, findings)
    if sound and parsed.plan.level is Level.PLAN:
        check_targets(parsed, findings)
    if previous is not None and sound:
        check_adaptation(parsed, previous, findings)
    return findings.sorted()


def _known(facts: Facts | Callable[[Plan], Facts] | None, plan: Plan) -> Facts | None:
    return facts if facts is None or isinstance(facts, Facts) else facts(plan)


def _boundary_bytes(
    plan: Plan, lanes: Mapping[GroupName, Lane], facts: Facts | None
) -> dict[GroupName, int]:
    """Bytes of a whole activation, or its gradient, that each group sends."""
    derived = plan.batch.tokens * plan.model.hidden * _BOUNDARY_ELEMENT_BYTES
    if facts is None:
        return dict.fromkeys(lanes, derived)
    return {
        name: max((sizes.boundary_bytes for sizes in facts.stages[name]), default=derived)
        for name in lanes
    }


def has_errors(findings: Sequence[Diagnostic]) -> bool:
    """Whether the findings keep a plan from being deployed."""
    return any(finding.severity is Severity.ERROR for finding in findings)
