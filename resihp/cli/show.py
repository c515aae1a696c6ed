"""`resihp show`: a plan as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.cli.plan_files import parse_text, read_text, report

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("file", metavar="PLAN", help="plan file, or - for stdin")
    parser.add_argument("--width", type=int, help="columns to use (default: those of the terminal)")


def run(args: argparse.Namespace) -> int:
    """Draw the plan."""
    from resihp.ir.show import draw

    text = read_text(args.file)
    parsed = parse_text(text, args.file)
    if isinstance(parsed, tuple):
        report(parsed, text, args.file)
        return 1
    print(draw(parsed.plan, width=max(40, args.width or _columns())), end="")
    return 0


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size((100, 24)).columns
