"""`resihp simulate`: how long an iteration takes, who is idle, how full memory gets."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resihp.cli.described import (
    add_cluster,
    add_health,
    add_lengths,
    add_profile,
    lengths_of,
    precision_of,
    pricing_of,
)
from resihp.cli.plan_files import name_of_file, parse_text, read_text, report
from resihp.errors import UserError

if TYPE_CHECKING:
    import argparse

    from resihp.ir.model import Plan
    from resihp.ir.source import Parsed

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="PLAN", help="plan or schedule, or - for stdin")
    add_cluster(parser)
    add_health(parser)
    add_lengths(parser)
    add_profile(parser)
    parser.add_argument(
        "--contention",
        action="store_true",
        help="transfers queue for the adapters and links that they share (slower to simulate)",
    )
    parser.add_argument(
        "--compare",
        metavar="POLICY,...|all",
        help="what policies make of the failures: none, recycle, oobleck, greyhound, adaptra, "
        "recycle+greyhound, oobleck+greyhound, resihp-literal, resihp",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.epilog = (
        "The plan is verified first. "
        "Exit status: 0 done, 1 findings, 2 wrong use, unreadable file or a lost rank in the plan."
    )


def run(args: argparse.Namespace) -> int:
    """Verify the plan, play it and print the figures."""
    import msgspec

    text = read_text(args.file)
    parsed = parse_text(text, args.file)
    if isinstance(parsed, tuple):
        report(parsed, text, args.file)
        return 1
    if _has_errors(parsed, args.file):
        return 1
    plan = parsed.plan
    plan = msgspec.structs.replace(plan, precision=precision_of(args, plan))
    found, page = _figures(plan, args) if args.compare is None else _comparison(plan, args)
    if args.format == "json":
        page = msgspec.json.format(msgspec.json.encode(found)).decode() + "\n"
    sys.stdout.write(page)
    return 0


def _figures(plan: Plan, args: argparse.Namespace) -> tuple[object, str]:
    """Of the plan itself, and the page that shows them."""
    from resihp.compiler.simulate import simulate
    from resihp.compiler.simulate.report import report_of
    from resihp.compiler.simulate.report_text import render_report

    pricing, lengths = pricing_of(plan, args), lengths_of(args, plan)
    found = report_of(simulate(plan, pricing, lengths=lengths, contention=args.contention))
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return found, render_report(found)


def _comparison(plan: Plan, args: argparse.Namespace) -> tuple[object, str]:
    """Of several policies, and their table. Raises UserError."""
    from resihp.compiler.adaptation import Situation
    from resihp.compiler.policies import find_policies
    from resihp.compiler.policies.comparison import compared, render
    from resihp.ir.model import Level

    names = find_policies(args.compare)
    if plan.level is not Level.PLAN:
        raise UserError(f"{name_of_file(args.file)} is a {plan.level}; `resihp lower` it first")
    if args.lengths is not None or args.contention:
        raise UserError("policies are compared at equal lengths and without --contention")
    found = compared(Situation(plan, pricing_of(plan, args)), names)
    return found, render(found)


def _has_errors(parsed: Parsed, path: str) -> bool:
    """Whether the verifier finds errors; whatever it finds is printed."""
    from resihp.compiler.facts import facts_of
    from resihp.ir.render import render_text
    from resihp.ir.verify import has_errors, verify

    findings = verify(parsed, facts=facts_of)
    if findings:
        print(render_text(findings, parsed.text, name_of_file(path)), file=sys.stderr)
    return has_errors(findings)
