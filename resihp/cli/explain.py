"""`resihp explain`: what a diagnostic code means, with an example and how it is mended."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from resihp.errors import UserError

if TYPE_CHECKING:
    import argparse

    from resihp.ir.explanation import Example

__all__ = ["add_arguments", "run"]

_WIDTH = 92
_WHAT = {"csv": "A file", "program": "Programs", "plan": "A plan"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("codes", nargs="*", metavar="CODE", help="such as RHP412 (default: list)")
    parser.epilog = "Without a code all codes are listed. Exit status: 0 done, 2 unknown code."


def run(args: argparse.Namespace) -> int:
    """Explain the codes, or list all."""
    from resihp.ir.explanation import list_codes

    if not args.codes:
        print(list_codes(), end="")
        return 0
    known = [_known(code) for code in args.codes]
    print("\n".join(map(_explain, known)), end="")
    return 0


def _known(code: str) -> str:
    """The code as the table has it; `rhp412` and `412` will do."""
    from resihp.ir.codes import CODES

    spelled = code.upper()
    if spelled.isdecimal():
        spelled = f"RHP{spelled:0>3}"
    if spelled not in CODES:
        import difflib

        near = difflib.get_close_matches(spelled, CODES, n=3, cutoff=0.5)
        advice = f"the nearest are {', '.join(near)}; " if near else ""
        raise UserError(f"unknown code `{code}`: {advice}`resihp explain` lists all")
    return spelled


def _explain(code: str) -> str:
    from resihp.ir.codes import explain
    from resihp.ir.explanation import change, example_of

    example, text = example_of(code), explain(code)
    assert text is not None
    what = _WHAT[example.file("bad").rpartition(".")[2]]
    parts = ["\n\n".join(textwrap.fill(part, _WIDTH) for part in text.split("\n\n")) + "\n"]
    if example.previous is not None:
        parts.append(
            f"The plan before ({example.file('previous')}):\n\n{_indented(example.previous)}"
        )
    parts.append(f"{what} with this fault ({example.file('bad')}):\n\n{_indented(example.bad)}")
    parts.append(f"What `resihp verify` says:\n\n{_indented(_findings(example))}")
    parts.append(f"Mended:\n\n{_indented(change(example))}")
    return "\n".join(parts)


def _indented(text: str) -> str:
    return textwrap.indent(text.rstrip("\n") + "\n", "    ")


def _findings(example: Example) -> str:
    """The findings of the bad example, made on the spot."""
    from resihp.cli.plan_files import parse_text
    from resihp.cli.program_files import is_program, verify_program_files
    from resihp.compiler.facts import facts_of
    from resihp.ir.lint import lint
    from resihp.ir.parser import parse
    from resihp.ir.render import render_text
    from resihp.ir.verify import verify

    path = example.file("bad")
    if is_program(example.bad):
        (file,) = verify_program_files([(path, example.bad)], None)
        return render_text(file.diagnostics, example.bad, path)
    parsed = parse_text(example.bad, path)
    if isinstance(parsed, tuple):
        return render_text(parsed, example.bad, path)
    previous = None if example.previous is None else parse(example.previous).plan
    found = verify(parsed, previous=previous, facts=facts_of)
    if example.code.startswith("RHP9"):
        found += lint(parsed)
    return render_text(found, example.bad, path)
