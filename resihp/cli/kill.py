"""`resihp kill [RUN] --rank N`: SIGKILL one rank of a running job, to see it go on."""

from __future__ import annotations

import argparse
from pathlib import Path

from resihp.cli.runs import add_running, running

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    add_running(parser)
    parser.add_argument("--rank", type=int, required=True, help="whose executor to kill")
    parser.add_argument("--run", type=Path, dest="named", metavar="RUN", help="the same as RUN")
    parser.epilog = "Exit status: 0 killed, 2 wrong use, no such run, or a rank that is not there."


def run(args: argparse.Namespace) -> int:
    """Ask the coordinator to kill the rank."""
    import asyncio

    from resihp.errors import UserError
    from resihp.monitor.operator import kill_rank

    if args.named is not None:
        if args.run is not None:
            raise UserError("RUN and --run RUN are the same; leave one of the two out")
        args.run = args.named
    print(asyncio.run(kill_rank(running(args), args.rank)))
    return 0
