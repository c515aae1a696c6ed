"""`resihp verify`: everything that is wrong with a plan."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resihp.cli.plan_files import name_of_file, parse_text, read_text
from resihp.errors import UserError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from resihp.ir.diagnostics import Diagnostic
    from resihp.ir.model import Plan

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("files", nargs="*", metavar="PLAN", help="plan file, or - for stdin")
    parser.add_argument(
        "--previous",
        metavar="PLAN",
        help="the plan that ran before: checks that all state has a live source",
    )
    parser.add_argument(
        "--transport",
        default="edge",
        help="how messages queue: `edge` is one FIFO per directed rank pair (default)",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--explain", metavar="CODE", help="say what a code such as RHP501 means")
    parser.epilog = "Exit status: 0 no errors, 1 findings, 2 wrong use or unreadable file."


def run(args: argparse.Namespace) -> int:
    """Verify each file; 1 if any has errors."""
    from resihp.ir.verify import check_transport, has_errors

    if args.explain is not None:
        print(_explain(args.explain))
        return 0
    check_transport(args.transport)
    if not args.files:
        raise UserError("which plan? Name a file, or - for the standard input")
    if [args.previous, *args.files].count("-") > 1:
        raise UserError("standard input can be read once only")
    previous = None if args.previous is None else _read_previous(args.previous)
    found: dict[str, Sequence[Diagnostic]] = {}
    for path in args.files:
        text = read_text(path)
        findings = found[name_of_file(path)] = _findings(text, path, previous, args.transport)
        if args.format == "text":
            _print(findings, text, path)
    if args.format == "json":
        from resihp.ir.render import render_json

        print(render_json(found), end="")
    return 1 if any(map(has_errors, found.values())) else 0


def _explain(code: str) -> str:
    from resihp.ir.codes import CODES, explain

    text = explain(code.upper())
    if text is None:
        import difflib

        near = difflib.get_close_matches(code.upper(), CODES, n=3, cutoff=0.5)
        raise UserError(f"unknown code `{code}`; there are {', '.join(near or CODES)}")
    return text


def _read_previous(path: str) -> Plan:
    from resihp.ir.parser import parse

    return parse(read_text(path), path=name_of_file(path)).plan


def _findings(text: str, path: str, previous: Plan | None, transport: str) -> Sequence[Diagnostic]:
    from resihp.compiler.facts import facts_of
    from resihp.ir.verify import verify

    parsed = parse_text(text, path)
    if isinstance(parsed, tuple):
        return parsed
    if parsed.plan.reconfigure and previous is None:
        print(
            f"{name_of_file(path)}: note: the reconfigure block is not checked without --previous",
            file=sys.stderr,
        )
    return verify(parsed, previous=previous, facts=facts_of, transport=transport)


def _print(findings: Sequence[Diagnostic], text: str, path: str) -> None:
    from resihp.ir.parser import normalise
    from resihp.ir.render import render_text, summary

    name = name_of_file(path)
    if findings:
        print(render_text(findings, normalise(text), name))
        print(f"{name}: {summary(findings)}")
    else:
        print(f"{name}: ok")
