"""`resihp expand`: what each rank runs, with peers, chunks and tensor types resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.cli.plan_files import parse_text, read_text, report

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from resihp.ir.program import Program

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="PLAN", help="plan file, or - for stdin")
    parser.add_argument("--rank", type=int, help="whose program (default: those of all ranks)")
    parser.add_argument(
        "--verbose", action="store_true", help="note chunks and bytes at the ends of lines"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.epilog = (
        "The text can be verified again: `resihp expand PLAN | resihp verify -`. "
        "Exit status: 0 done, 1 not a plan, 2 wrong use, or a rank without a program."
    )


def run(args: argparse.Namespace) -> int:
    """Print the program of the rank, or of every rank that has one."""
    from resihp.ir.expand import expand

    text = read_text(args.file)
    parsed = parse_text(text, args.file)
    if isinstance(parsed, tuple):
        report(parsed, text, args.file)
        return 1
    ranks = parsed.plan.active_ranks if args.rank is None else (args.rank,)
    programs = [expand(parsed.plan, rank) for rank in ranks]
    if args.format == "text":
        print("\n".join(_text(program, args.verbose) for program in programs), end="")
    else:
        print(_json(programs, alone=args.rank is not None))
    return 0


def _text(program: Program, verbose: bool) -> str:
    from resihp.ir.listing import notes_of
    from resihp.ir.printer import format_text
    from resihp.ir.program_text import parse_programs, print_program

    if not verbose:
        return print_program(program)
    # Formatting aligns the notes of neighbouring lines.
    return format_text(parse_programs(print_program(program, notes_of(program)))[0])


def _json(programs: Sequence[Program], *, alone: bool) -> str:
    import msgspec

    from resihp.ir.listing import listing

    listed = [listing(program) for program in programs]
    document = msgspec.json.encode(listed[0] if alone else listed)
    return msgspec.json.format(document, indent=2).decode()
