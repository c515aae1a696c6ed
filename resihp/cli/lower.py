"""`resihp lower`: from a schedule to a plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.cli.csv_files import in_cells, is_csv
from resihp.cli.plan_files import name_of_file, parse_text, read_text, report
from resihp.errors import UserError

if TYPE_CHECKING:
    import argparse

    from resihp.ir.source import Parsed

__all__ = ["add_arguments", "run"]

_PASSES = ("finish", "transfers", "chunks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="SCHEDULE", help="schedule file, or - for stdin")
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
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plan to this file")
    parser.epilog = (
        "The schedule and then the plan are verified. "
        "Exit status: 0 done, 1 not a schedule, or findings, 2 wrong use or unreadable file."
    )


def run(args: argparse.Namespace) -> int:
    """Verify the schedule, lower it, verify the plan and print it."""
    from msgspec import structs

    from resihp.compiler.lower import passes_for
    from resihp.ir.parser import parse
    from resihp.ir.printer import print_plan

    text = read_text(args.file)
    parsed = parse_text(text, args.file)
    if isinstance(parsed, tuple):
        report(parsed, text, args.file)
        return 1
    plan = parsed.plan
    if args.transport is not None:
        plan = structs.replace(plan, transport=args.transport)
    passes = passes_for(plan, scatter_everywhere=args.scatter == "always")
    if not _is_sound(parsed, name_of_file(args.file)):
        return 1
    for step in passes:
        plan = step.apply(plan)
        if step.name == args.print_after:
            break
    text = print_plan(plan)
    if args.print_after is None and not _is_sound(parse(text), "<lowered plan>"):
        return 1
    _write(text, args.output)
    return 0


def _is_sound(parsed: Parsed, name: str) -> bool:
    """Whether a text has no errors; findings are printed."""
    from resihp.compiler.facts import facts_of
    from resihp.ir.render import render_text
    from resihp.ir.verify import has_errors, verify

    findings = verify(parsed, facts=facts_of, transport=parsed.plan.transport or "edge")
    if is_csv(name):
        findings = in_cells(findings, parsed)
    if findings:
        print(render_text(findings, parsed.text, name), file=sys.stderr)
    return not has_errors(findings)


def _write(text: str, path: str | None) -> None:
    if path is None:
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot write {path}: {reason}") from None
