"""`resihp expand`: the program of one rank, with peers, chunks and bytes resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.cli.plan_files import parse_text, read_text, report

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="PLAN", help="plan file, or - for stdin")
    parser.add_argument("--rank", type=int, required=True, help="whose program")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.epilog = "Exit status: 0 done, 1 not a plan, 2 wrong use, or a rank without a program."


def run(args: argparse.Namespace) -> int:
    """List what the rank runs."""
    from resihp.compiler.facts import facts_of
    from resihp.ir.expand import expand
    from resihp.ir.listing import listing, render_listing

    text = read_text(args.file)
    parsed = parse_text(text, args.file)
    if isinstance(parsed, tuple):
        report(parsed, text, args.file)
        return 1
    program = expand(parsed.plan, args.rank)
    sizes = facts_of(parsed.plan).stages[program.group][0]
    listed = listing(program, sizes.boundary_bytes)
    if args.format == "json":
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(listed), indent=2).decode())
    else:
        print(render_listing(listed), end="")
    return 0
