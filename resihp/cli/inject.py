"""`resihp inject RUN KIND`: bring a fault about in a running job, to see it go on."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    from resihp.config.injection import FAULT_KINDS

    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a running job")
    parser.add_argument("kind", choices=FAULT_KINDS, metavar="KIND", help=", ".join(FAULT_KINDS))
    parser.add_argument("--rank", type=int, default=0, help="whom it hits (default: 0)")
    parser.add_argument(
        "--instruction", type=int, help="of the rank's next iteration (default: at once)"
    )
    parser.add_argument("--lasts", type=float, metavar="S", help="seconds (default: for ever)")
    parser.add_argument("--factor", type=float, help="slow: times as long (default: 2)")
    parser.add_argument(
        "--delay", type=float, metavar="S", help="slow_link, late_beats: seconds (default: 0.05)"
    )
    parser.add_argument("--share", type=float, help="lost_beats: of all beats (default: 1)")
    parser.epilog = (
        "exit, exception, hold_gil and torn_checkpoint strike in the rank's next iteration. "
        "Exit status: 0 on its way, 2 wrong use, no such run, or a rank that is not there."
    )


def run(args: argparse.Namespace) -> int:
    """Ask the coordinator to bring the fault about."""
    import asyncio

    import msgspec

    from resihp.config.injection import Injection, said_only_of
    from resihp.errors import UserError
    from resihp.monitor.operator import find_run, inject_fault

    said = {
        "kind": args.kind,
        "instruction": args.instruction,
        "lasts_s": args.lasts,
        "factor": args.factor,
        "delay_s": args.delay,
        "share": args.share,
    }
    fault = {name: value for name, value in said.items() if value is not None}
    try:
        injection = msgspec.convert(fault, Injection)
    except msgspec.ValidationError as error:
        raise UserError(f"this fault cannot be: {error}") from error
    for key, wanted in said_only_of(injection):
        raise UserError(f"{key}: {wanted}")
    run_dir = find_run(args.run, Path("runs"), named_by="RUN")
    print(asyncio.run(inject_fault(run_dir, args.rank, fault)))
    return 0
