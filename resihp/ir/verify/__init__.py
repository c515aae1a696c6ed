"""The verifier: everything that is wrong with a plan, in one run.

Areas run from the ground up (ranges, topology, exactly once, data flow, channel order, progress,
memory, gradients, adaptation). A later area leaves alone what an earlier one has reported, so
one mistake gives few findings; none of them crashes on a broken plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resihp.errors import UserError
from resihp.ir.diagnostics import Diagnostic, Severity
from resihp.ir.facts import Facts
from resihp.ir.lanes import alike, lanes_of
from resihp.ir.model import Plan
from resihp.ir.source import Parsed
from resihp.ir.verify.adaptation import check_adaptation, check_targets
from resihp.ir.verify.channels import check_channels
from resihp.ir.verify.dataflow import check_dataflow
from resihp.ir.verify.findings import Findings
from resihp.ir.verify.gradients import check_gradients
from resihp.ir.verify.memory import check_memory
from resihp.ir.verify.once import check_once
from resihp.ir.verify.progress import check_progress
from resihp.ir.verify.ranges import check_ranges, check_sizes
from resihp.ir.verify.topology import check_topology

__all__ = ["TRANSPORTS", "check_transport", "has_errors", "verify"]

TRANSPORTS = ("edge",)
"""Transports that progress can be proved under. `edge`: one FIFO per directed rank pair."""


def check_transport(name: str) -> None:
    """Raise `UserError` unless progress can be proved under the transport `name`."""
    if name not in TRANSPORTS:
        known = ", ".join(f"`{transport}`" for transport in TRANSPORTS)
        raise UserError(f"unknown transport `{name}`; the verifier knows {known}")


def verify(
    parsed: Parsed,
    *,
    previous: Plan | None = None,
    facts: Facts | Callable[[Plan], Facts] | None = None,
    transport: str = "edge",
) -> list[Diagnostic]:
    """Every finding about a plan, by place; empty for a plan that may run.

    `previous` is the plan that ran before: with it the reconfiguration is checked. `facts` are the
    sizes that the memory check needs, or a function that derives them from the plan (called only
    if the layout is sound); memory is checked if the plan also has a memory line.

    Raises `UserError` for an unknown transport.
    """
    check_transport(transport)
    findings = Findings()
    check_sizes(parsed, findings)
    if len(findings):
        return findings.sorted()
    check_ranges(parsed, findings)
    check_topology(parsed, findings)
    findings.alike = alike(parsed.plan)
    lanes = lanes_of(parsed.plan, findings.alike)
    work = check_once(parsed, lanes, findings)
    matched = check_dataflow(parsed, lanes, work, findings)
    check_channels(parsed, matched, findings)
    check_progress(parsed, lanes, findings)
    check_gradients(parsed, findings)
    sound = not findings.has("RHP1", "RHP2")
    if facts is not None and parsed.plan.memory_bytes is not None and sound:
        known = facts if isinstance(facts, Facts) else facts(parsed.plan)
        check_memory(parsed, lanes, known, findings)
    if sound:
        check_targets(parsed, findings)
    if previous is not None and sound:
        check_adaptation(parsed, previous, findings)
    return findings.sorted()


def has_errors(findings: Sequence[Diagnostic]) -> bool:
    """Whether the findings keep a plan from being deployed."""
    return any(finding.severity is Severity.ERROR for finding in findings)
