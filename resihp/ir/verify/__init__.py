"""The verifier: everything that is wrong with a plan, in one run.

Areas run from the ground up (ranges, topology, exactly once, data flow, channel order, progress,
memory, gradients, adaptation). A later area leaves alone what an earlier one has reported, so
one mistake gives few findings; none of them crashes on a broken plan. A schedule names no
transfers, no reduction and no step, so what is proved about them is left out.

What instructions do is first tried to be proved right on whole arrays (`resihp.ir.verify.fast`),
which takes a hundredth of the time. Only where that fails do the areas look what is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

from resihp.ir.diagnostics import Diagnostic, Severity
from resihp.ir.facts import Facts
from resihp.ir.kept import kept_by
from resihp.ir.lanes import Lane, alike, lanes_of
from resihp.ir.model import GroupName, Level, Plan
from resihp.ir.placement import placement_of
from resihp.ir.program import boundary_type
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
from resihp.ir.verify.ranges import (
    check_bodies,
    check_ranges,
    check_recompute,
    check_sizes,
)
from resihp.ir.verify.report import Report
from resihp.ir.verify.topology import check_topology

__all__ = ["TRANSPORTS", "check_transport", "has_errors", "verify"]

_WORTH_IMPORTING_NUMPY = 8_000
"""Instructions, those of a shared body once."""


def check_transport(name: str) -> None:
    """Raise `UserError` unless progress can be proved under the transport `name`."""
    parse_transport(name)


def verify(
    parsed: Parsed,
    *,
    previous: Plan | None = None,
    facts: Facts | Callable[[Plan], Facts] | None = None,
    transport: str | None = None,
    quick_proof: bool = True,
) -> list[Diagnostic]:
    """Every finding about a plan, by place; empty for a plan that may run.

    `previous` is the plan that ran before: with it the reconfiguration is checked. `facts` are the
    sizes that the memory check needs, or a function that derives them from the plan (called only
    if the layout is sound); memory is checked if the plan also has a memory line. Progress is
    proved under `transport` (see `resihp.ir.transport`), or else under the one that the plan
    names, or else under `edge`; what crosses stages has the `boundary_bytes` of the facts, and
    without facts tokens * hidden elements of the plan's precision. Without `quick_proof` nothing
    but time is different.

    Raises `UserError` for an unknown transport.
    """
    named = parsed.plan.transport if transport is None else transport
    proved_under = EDGE if named is None else parse_transport(named)
    check = partial(_verify, facts=facts, transport=proved_under)
    return check(parsed, previous, quick_proof=quick_proof, look_for_swaps=True)


def _verify(
    parsed: Parsed,
    previous: Plan | None,
    facts: Facts | Callable[[Plan], Facts] | None,
    transport: Transport,
    *,
    quick_proof: bool,
    look_for_swaps: bool,
) -> list[Diagnostic]:
    findings = Findings()
    check_sizes(parsed, findings)
    if len(findings):
        return findings.sorted()
    plan = parsed.plan
    check_ranges(parsed, findings)
    check_topology(parsed, findings)
    if not len(findings):
        check_recompute(parsed, placement_of(plan).num_stages, findings)

    @cache
    def known() -> Facts | None:
        return _known(facts, plan)

    is_sound = not len(findings)
    if not (quick_proof and is_sound and _is_proved(parsed, transport, known)):
        check_bodies(parsed, placement_of(plan), findings)
        is_sound = not findings.has("RHP1", "RHP2")
        needed = is_sound and (plan.memory_bytes is not None or transport.kind == "eager")
        sizes = known() if needed else None
        _check_streams(parsed, sizes, transport, findings, look_for_swaps=look_for_swaps)
    if is_sound and plan.level is Level.PLAN:
        check_targets(parsed, findings)
    if previous is not None and is_sound:
        check_adaptation(parsed, previous, findings)
    return findings.sorted()


def _is_proved(parsed: Parsed, transport: Transport, known: Callable[[], Facts | None]) -> bool:
    """Whether nothing is wrong with the streams of a plan whose layout is sound."""
    if kept_by(parsed.plan) or transport != EDGE:
        return False
    if not ("numpy" in sys.modules or _is_large(parsed.plan)):
        return False
    from resihp.ir.verify.fast import certify

    return certify(parsed.arrays, known)


def _is_large(plan: Plan) -> bool:
    """Whether importing numpy takes less time than it saves."""
    written = {id(stream.body): len(stream.body) for stream in plan.streams}
    return sum(written.values()) > _WORTH_IMPORTING_NUMPY


def _check_streams(
    parsed: Parsed,
    facts: Facts | None,
    transport: Transport,
    findings: Findings,
    *,
    look_for_swaps: bool,
) -> None:
    """All that streams can do wrong, except for numbers out of range."""
    plan = parsed.plan
    findings.alike = alike(plan)
    lanes = lanes_of(plan, findings.alike)
    report = Report(parsed, findings)
    check_pairs(lanes, report)
    work = check_once(lanes, report)
    check_channels(check_dataflow(lanes, work, report), report)
    check_params(lanes, report)
    sizes = _boundary_bytes(plan, lanes, facts) if transport.kind == "eager" else None
    again = partial(
        _verify,
        previous=None,
        facts=facts,
        transport=transport,
        quick_proof=False,
        look_for_swaps=False,
    )
    check_progress(parsed, lanes, transport, sizes, findings, again if look_for_swaps else None)
    check_gradients(parsed, placement_of(plan), findings)
    if facts is not None and plan.memory_bytes is not None:
        check_memory(parsed, lanes, facts, findings)


def _known(facts: Facts | Callable[[Plan], Facts] | None, plan: Plan) -> Facts | None:
    return facts if facts is None or isinstance(facts, Facts) else facts(plan)


def _boundary_bytes(
    plan: Plan, lanes: Mapping[GroupName, Lane], facts: Facts | None
) -> dict[GroupName, int]:
    """Bytes of a whole activation, or its gradient, that each group sends."""
    derived = boundary_type(plan).num_bytes
    if facts is None:
        return dict.fromkeys(lanes, derived)
    return {
        name: max((sizes.boundary_bytes for sizes in facts.stages[name]), default=derived)
        for name in lanes
    }


def has_errors(findings: Sequence[Diagnostic]) -> bool:
    """Whether the findings keep a plan from being deployed."""
    return any(finding.severity is Severity.ERROR for finding in findings)
