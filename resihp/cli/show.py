"""`resihp show`: a plan as a picture, or an iteration of a run as its ranks saw it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.cli.csv_files import is_csv
from resihp.cli.described import add_cluster, add_health, add_lengths
from resihp.cli.plan_files import parse_text, read_text, report, write_text
from resihp.errors import UserError

if TYPE_CHECKING:
    import argparse

    from resihp.ir.drawing.scene import Scene
    from resihp.ir.model import Plan
    from resihp.ir.source import Parsed

__all__ = ["add_arguments", "run"]

_PREDICTS = ("cluster", "fail", "slow", "link", "health", "lengths", "contention")
"""Options that say how times are predicted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "file", metavar="PLAN", help="plan file, - for stdin, or the directory of a run"
    )
    parser.add_argument(
        "--format",
        choices=("text", "svg", "trace", "json"),
        default="text",
        help="trace is a Chrome trace, which Perfetto opens",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="(default: standard output)")
    parser.add_argument(
        "--replicas",
        metavar="0,3..5",
        help="replicas to draw (default: one of each kind, as long as there is room)",
    )
    parser.add_argument(
        "--width",
        type=int,
        help="columns of the text (default: those of the terminal) or pixels of the SVG (default: "
        "so that numbers have room)",
    )
    parser.add_argument(
        "--transfers", action="store_true", help="draw what goes from group to group (SVG)"
    )
    parser.add_argument(
        "--unit",
        action="store_true",
        help="units of time (F, B and W 1, BW 2, transfers 0) instead of predicted seconds",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="iteration of a run (default: the last one)"
    )
    add_cluster(parser)
    add_health(parser)
    add_lengths(parser)
    parser.add_argument(
        "--contention",
        action="store_true",
        help="transfers queue for the adapters and links that they share",
    )
    parser.epilog = (
        "The text of a plan draws rows in units of time, with a table of predicted times below "
        "them. Of a run the text is the table of what its ranks saw in one iteration; the other "
        "formats draw it. Exit status: 0 done, 1 not a plan, 2 wrong use."
    )


def run(args: argparse.Namespace) -> int:
    """Draw the plan."""
    _check(args)
    if Path(args.file).is_dir():
        return _write(args, _seen(args))
    if args.step is not None:
        raise UserError("--step is an iteration of a run: name its directory instead of a plan")
    text = read_text(args.file)
    parsed = parse_text(text, args.file)
    if isinstance(parsed, tuple):
        report(parsed, text, args.file)
        return 1
    if args.format == "text":
        return _write(args, _text(args, parsed))
    return _write(args, _picture(args, _scene(args, parsed)))


def _write(args: argparse.Namespace, drawn: str) -> int:
    if args.output is None:
        sys.stdout.write(drawn)
    else:
        write_text(args.output, drawn)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises UserError for options that say nothing about units of time."""
    said = [name for name in _PREDICTS if getattr(args, name)]
    if args.unit and said:
        raise UserError(f"--unit predicts nothing, so --{said[0]} says nothing: leave one out")


def _text(args: argparse.Namespace, parsed: Parsed) -> str:
    from resihp.ir.show import draw

    replicas = _replicas(args, parsed.plan)
    # The table below has the predicted shares, which are others than those of units.
    width = max(40, args.width or _columns())
    drawn = draw(parsed.plan, width=width, replicas=replicas, has_idle=args.unit)
    if args.unit:
        return drawn
    from resihp.ir.drawing.table import draw_table

    return f"{drawn}\n{draw_table(_scene(args, parsed))}"


def _scene(args: argparse.Namespace, parsed: Parsed) -> Scene:
    from resihp.cli.played import played_of
    from resihp.ir.drawing.scene import scene_of

    played = played_of(args, parsed, has_model=not is_csv(args.file))
    return scene_of(played, _replicas(args, parsed.plan))


def _seen(args: argparse.Namespace) -> str:
    """An iteration of a run."""
    from resihp.ir.drawing.scene import scene_of
    from resihp.monitor.observations import played_run

    said = [name for name in ("unit", *_PREDICTS) if getattr(args, name)]
    if said:
        raise UserError(f"the times of a run were seen, so --{said[0]} says nothing: leave it out")
    played = played_run(Path(args.file), args.step)
    scene = scene_of(played, _replicas(args, played.plan))
    if args.format == "text":
        from resihp.ir.drawing.table import draw_table

        hint = "`--format svg` draws when each of them ran, `--format trace` opens in Perfetto"
        return f"{draw_table(scene)}\n{hint}\n"
    return _picture(args, scene)


def _picture(args: argparse.Namespace, scene: Scene) -> str:
    if args.format == "svg":
        from resihp.ir.drawing.svg import draw_svg

        return draw_svg(scene, width=args.width, wires=args.transfers)
    return _encoded(args.format, scene)


def _encoded(format_: str, scene: Scene) -> str:
    import msgspec

    if format_ == "trace":
        from resihp.ir.drawing.trace import trace_of

        return msgspec.json.encode(trace_of(scene)).decode() + "\n"
    from resihp.ir.drawing.document import document_of

    return msgspec.json.encode(document_of(scene)).decode() + "\n"


def _replicas(args: argparse.Namespace, plan: Plan) -> frozenset[int] | None:
    """What `--replicas` says. Raises UserError for what are no replicas of the plan."""
    if args.replicas is None:
        return None
    there = {group.replica for group in plan.groups}
    chosen: set[int] = set()
    for part in args.replicas.split(","):
        first, dots, last = part.partition("..")
        if not _is_number(first) or (dots and not _is_number(last)):
            raise UserError(f"--replicas {args.replicas}: {part!r} is no replica; write 0,3..5")
        interval = range(int(first), int(last if dots else first) + 1)
        if not interval or interval[0] not in there or interval[-1] not in there:
            raise UserError(
                f"--replicas {args.replicas}: the plan has no {part}; its replicas are "
                f"{min(there, default=0)} to {max(there, default=0)}"
            )
        chosen.update(one for one in there if one in interval)
    return frozenset(chosen)


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 10


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size((100, 24)).columns
