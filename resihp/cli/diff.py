"""`resihp diff`: what changed in meaning between two plans, and what it costs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from resihp.cli.plan_files import parse_file, read_text
from resihp.errors import UserError

if TYPE_CHECKING:
    import argparse

    from resihp.ir.difference_text import Comparison
    from resihp.ir.source import Parsed

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("old", metavar="OLD", help="plan file, or - for stdin")
    parser.add_argument("new", metavar="NEW", help="plan file, or - for stdin")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.epilog = "Exit status: 0 same meaning, 1 another one, 2 wrong use or not a plan."


def run(args: argparse.Namespace) -> int:
    """Compare two plans; 1 where they differ."""
    from resihp.ir.difference_text import render_json, render_text

    if args.old == args.new == "-":
        raise UserError("standard input can be read once only")
    comparison = _compare(_read(args.old), _read(args.new))
    render = render_json if args.format == "json" else render_text
    print(render(comparison), end="")
    return 0 if comparison.changes.is_empty else 1


def _read(path: str) -> Parsed:
    return parse_file(read_text(path), path)


def _compare(old: Parsed, new: Parsed) -> Comparison:
    """Costs are left out, with a note, where a plan is not right."""
    from resihp.compiler.facts import facts_of, move_bytes
    from resihp.ir.difference import compare
    from resihp.ir.difference_text import Comparison
    from resihp.ir.measures import measure, state_moves

    changes, notes = compare(old, new), list[str]()
    sound = [_is_sound(parsed, notes) for parsed in (old, new)]
    before, after = (
        measure(parsed.plan, facts_of(parsed.plan)) if right else None
        for parsed, right in zip((old, new), sound, strict=True)
    )
    moves = None
    if all(sound) and not changes.is_empty and _follows(old, new, notes):
        moves = state_moves(old.plan, new.plan, partial(move_bytes, new.plan.model))
    assert old.path is not None
    assert new.path is not None
    return Comparison(
        before=old.path,
        after=new.path,
        changes=changes,
        measures_before=before,
        measures_after=after,
        state_moves=moves,
        notes=tuple(notes),
    )


def _is_sound(parsed: Parsed, notes: list[str]) -> bool:
    from resihp.compiler.facts import facts_of
    from resihp.ir.render import summary
    from resihp.ir.verify import has_errors, verify

    findings = verify(parsed, facts=facts_of)
    if has_errors(findings):
        notes.append(
            f"`resihp verify {parsed.path}` finds {summary(findings)}: time, memory and state are "
            "left out"
        )
    return not has_errors(findings)


def _follows(old: Parsed, new: Parsed, notes: list[str]) -> bool:
    """Whether the state of `old` can become that of `new`."""
    from resihp.ir.verify import has_errors, verify

    findings = verify(new, previous=old.plan)
    if not has_errors(findings):
        return True
    first = findings[0]
    notes.append(
        f"{new.path} cannot follow {old.path}, so no state moves: {first.code} {first.message}; "
        f"see `resihp verify --previous {old.path} {new.path}`"
    )
    return False
