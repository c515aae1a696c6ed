"""`resihp lower`: from a schedule to a plan."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resihp.cli.csv_files import add_csv_arguments, csv_reading, in_cells, is_csv
from resihp.cli.plan_files import (
    add_output,
    name_of_file,
    parse_text,
    read_text,
    report,
    write_plan,
)

if TYPE_CHECKING:
    import argparse

    from resihp.cli.csv_files import CsvReading
    from resihp.ir.source import Parsed

__all__ = ["add_arguments", "run"]

_PASSES = ("finish", "transfers", "chunks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="SCHEDULE", help="schedule, or torch's CSV; - for stdin")
    parser.add_argument(
        "--transport",
        metavar="edge|pair|rank|eager=BYTES",
        help="make a plan for this transport instead of the one that the schedule names (edge if "
        "none): edge receives as late as possible, the others where the tensor is sent",
    )
    parser.add_argument(
        "--scatter",
        choices=("needed", "always"),
        default="needed",
        help="cut tensors into chunks where TP degrees differ (needed, default) or between all "
        "groups of several ranks",
    )
    parser.add_argument(
        "--print-after",
        choices=_PASSES,
        metavar="|".join(_PASSES),
        help="print what this pass makes and stop; only after the last one it is a complete plan",
    )
    add_output(parser)
    add_csv_arguments(parser)
    parser.epilog = (
        "The schedule and then the plan are verified. "
        "Exit status: 0 done, 1 not a schedule, or findings, 2 wrong use or unreadable file."
    )


def run(args: argparse.Namespace) -> int:
    """Verify the schedule, lower it, verify the plan and print it."""
    from msgspec import structs

    from resihp.compiler.lower import everywhere, lower, transport_of
    from resihp.ir.parser import parse
    from resihp.ir.printer import print_plan

    csv = csv_reading(args)
    text = read_text(args.file)
    parsed = parse_text(text, args.file, csv)
    if isinstance(parsed, tuple):
        report(parsed, text, args.file)
        return 1
    plan = parsed.plan
    if args.transport is not None:
        plan = structs.replace(plan, transport=args.transport)
    transport_of(plan)
    if _has_errors(parsed, name_of_file(args.file), csv if is_csv(args.file, csv) else None):
        return 1
    last_pass = _PASSES[-1] if args.print_after is None else args.print_after
    scatter = everywhere if args.scatter == "always" else None
    plan = lower(plan, scatter=scatter, last_pass=last_pass)
    if args.print_after is None and _has_errors(parse(print_plan(plan)), "<lowered plan>"):
        return 1
    write_plan(plan, args)
    return 0


def _has_errors(parsed: Parsed, name: str, csv: CsvReading | None = None) -> bool:
    """Whether the verifier finds errors in a text; whatever it finds is printed."""
    from resihp.compiler.facts import facts_of
    from resihp.ir.render import render_text
    from resihp.ir.verify import has_errors, verify

    findings = verify(parsed, facts=facts_of)
    if csv is not None:
        findings = in_cells(findings, parsed, csv)
    if findings:
        print(render_text(findings, parsed.text, name), file=sys.stderr)
    return has_errors(findings)
