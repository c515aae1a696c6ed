"""Lint: plans that can run, and waste something. Every finding is a warning.

A plan with errors is not looked at: what is wasted shows only once it is clear what runs. The
thresholds and their reasons stand in the module of each check and in docs/plan-language.md.
"""

from __future__ import annotations

from resihp.ir.diagnostics import Diagnostic, Severity
from resihp.ir.lint.balance import check_balance
from resihp.ir.lint.cuts import check_cuts
from resihp.ir.lint.early import check_early
from resihp.ir.lint.exchange import check_exchange
from resihp.ir.lint.idle import check_idle
from resihp.ir.lint.late import check_late
from resihp.ir.program import boundary_type
from resihp.ir.source import Parsed
from resihp.ir.transport import parse_transport
from resihp.ir.verify.findings import Findings
from resihp.ir.view import view_of

__all__ = ["lint"]


def lint(parsed: Parsed, *, transport: str | None = None) -> list[Diagnostic]:
    """Every warning about a plan in which `verify` finds no error, by place.

    `transport` is the one that the plan is to run on (None: the plan's own, or `edge`). Raises
    `UserError` for an unknown one.
    """
    name = parsed.plan.transport or "edge" if transport is None else transport
    queues = parse_transport(name)
    findings = Findings(Severity.WARNING)
    view = view_of(parsed)
    findings.alike = view.alike
    check_idle(view, findings)
    check_balance(view, findings)
    check_exchange(view, findings)
    check_cuts(view, findings)
    if queues.kind == "edge":
        check_early(view, findings)
    if queues.kind == "eager":
        sent = boundary_type(parsed.plan).num_bytes
        check_late(view, queues, dict.fromkeys(view.lanes, sent), findings)
    return findings.sorted()
