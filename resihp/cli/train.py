"""`resihp train JOB`: run a job on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("job", type=Path, help="the job file (TOML)")
    parser.add_argument(
        "--no-inject", action="store_true", help="leave out the faults that the job file injects"
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="act as N machines, each with its part of the ranks and a monitor of its own; one "
        "that is killed is not started again",
    )
    parser.epilog = (
        "Exit status: 0 finished, 1 stopped by an error or a refused plan, 2 wrong use or a wrong "
        "job file, 4 more lost than any plan can carry, 130 interrupted, 128 + N ended by signal N."
    )


def _network(nodes: Sequence[str], world: int, path: Path) -> str:
    """Why a job of several machines does not begin here, and what to do instead."""
    from resihp.config import place_of

    num = len(nodes)
    return (
        f"{place_of(path, 'network.nodes')}: network.nodes names the machines of a job under "
        f"torchrun, and `resihp train` starts ranks on this one only; nearest valid: on each node "
        f"torchrun --nnodes={num} --nproc-per-node={world // num} -m resihp.worker {path}, or "
        f"leave [network] out and use resihp train --nodes {num}, which acts as {num} machines"
    )


def run(args: argparse.Namespace) -> int:
    """Start one supervisor per rank and wait; the exit code of the job."""
    from resihp.config import load
    from resihp.errors import UserError
    from resihp.monitor.launcher import Launcher
    from resihp.monitor.preflight import check_job
    from resihp.wire.loop import run

    job = load(args.job)
    check_job(job, args.job)
    if job.network.nodes:
        raise UserError(_network(job.network.nodes, job.parallel.world, args.job))
    if args.nodes < 1:
        raise UserError(f"--nodes {args.nodes}: there is at least one; use 1 or more")
    return run(Launcher(job, inject=not args.no_inject, num_nodes=args.nodes).run())
