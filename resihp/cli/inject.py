"""`resihp inject [RUN] KIND`: bring a fault about in a running job, to see it go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.cli.runs import add_running, running

if TYPE_CHECKING:
    import argparse

    from resihp.config.injection import FaultKind

__all__ = ["add_arguments", "run"]

_FLAGS = {
    "instruction": "--instruction",
    "moment": "--moment",
    "lasts_s": "--lasts",
    "factor": "--factor",
    "delay_s": "--delay",
    "share": "--share",
}
"""What says each key of an `[[inject]]` here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    from resihp.config.injection import FAULT_KINDS, MOMENTS

    add_running(parser)
    parser.add_argument("kind", metavar="KIND", help=", ".join(FAULT_KINDS))
    parser.add_argument(
        "--rank",
        type=int,
        help="whom it hits (default: 0), or whose node; a coordinator needs none",
    )
    parser.add_argument(
        "--instruction", type=int, help="of the rank's next iteration (default: at once)"
    )
    parser.add_argument(
        "--moment", help=f"of the next iteration or recovery, instead: {', '.join(MOMENTS)}"
    )
    parser.add_argument(
        "--lasts", type=float, metavar="S", help="seconds (default: for ever; hold_gil needs it)"
    )
    parser.add_argument("--factor", type=float, help="slow: times as long (default: 2)")
    parser.add_argument(
        "--delay", type=float, metavar="S", help="slow_link, late_beats: seconds (default: 0.05)"
    )
    parser.add_argument("--share", type=float, help="lost_beats: of all beats (default: 1)")
    parser.epilog = (
        "exit and exception strike in the rank's next iteration, torn_checkpoint when the rank "
        "next writes a file of a saved version. "
        "Exit status: 0 on its way, 2 wrong use, no such run, or a rank that is not there."
    )


def run(args: argparse.Namespace) -> int:
    """Ask the coordinator to bring the fault about."""
    import asyncio

    from resihp.config.injection import is_of_a_rank
    from resihp.monitor.operator import inject_fault

    fault = _fault(args)
    rank = 0 if args.rank is None and is_of_a_rank(fault["kind"]) else args.rank
    print(asyncio.run(inject_fault(running(args), rank, fault)))
    return 0


def _fault(args: argparse.Namespace) -> dict[str, str | int | float]:
    """The keys of an `[[inject]]`. Raises UserError where they cannot be."""
    from resihp.config.injection import kinds_with
    from resihp.errors import UserError

    kind = _kind(args.kind)
    fault: dict[str, str | int | float] = {"kind": kind}
    for key, flag in _FLAGS.items():
        value = getattr(args, flag.removeprefix("--"))
        if value is None:
            continue
        said = f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"
        _check_value(key, value, said)
        kinds = kinds_with(key)
        if kind not in kinds:
            near = _nearest(kind, kinds)
            raise UserError(
                f"{said}: is not said of {kind}, but of {', '.join(kinds)}; "
                f"nearest valid: leave it out, or {near}"
            )
        fault[key] = value
    if "moment" in fault and "instruction" in fault:
        raise UserError("--moment is said instead of --instruction; leave one of the two out")
    if kind == "hold_gil" and "lasts_s" not in fault:
        raise UserError(
            "hold_gil needs --lasts, for how long no other thread runs; nearest valid: --lasts 1"
        )
    return fault


def _kind(word: str) -> FaultKind:
    from resihp.config.injection import FAULT_KINDS
    from resihp.errors import UserError

    found: FaultKind | None = next((kind for kind in FAULT_KINDS if kind == word), None)
    if found is None:
        near = _nearest(word, FAULT_KINDS)
        raise UserError(
            f'no fault is called "{word}"; nearest valid: {near}, of {", ".join(FAULT_KINDS)}'
        )
    return found


def _check_value(key: str, value: object, said: str) -> None:
    import msgspec

    from resihp.config.injection import MOMENTS, Injection
    from resihp.config.wording import bounds_in_words, wanted
    from resihp.errors import UserError

    if key == "moment" and value not in MOMENTS:
        near = _nearest(str(value), MOMENTS)
        raise UserError(f"{said}: must be {' or '.join(MOMENTS)}; nearest valid: {near}")
    field = next(each for each in msgspec.structs.fields(Injection) if each.name == key)
    try:
        msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        words = bounds_in_words(field.type) or wanted(value, field.type, error)
        raise UserError(f"{said}: {words}") from error


def _nearest(word: str, choices: tuple[str, ...]) -> str:
    import difflib

    return difflib.get_close_matches(word, choices, n=1, cutoff=0.0)[0]
