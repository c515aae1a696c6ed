"""`resihp chaos JOB`: run a job under many faults and say what became of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resihp.chaos.mix import Strike
    from resihp.config import JobConfig

__all__ = ["add_arguments", "run"]

DEFAULT_FAULTS = 20
MOST = 1 << 24
"""Of any number on the command line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("job", type=Path, help="the job file; its [[inject]] are left out")
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--faults", type=int, metavar="N", help="how many (default: 20)")
    much.add_argument("--minutes", type=float, metavar="M", help="how long instead")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument(
        "--every", type=float, default=3.0, metavar="S", help="seconds between two (default: 3)"
    )
    parser.add_argument("--steps", type=int, help="of the job, instead of its own")
    parser.add_argument("--kinds", metavar="KIND,...", help="only these (default: all of the mix)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="replay a fault trace (InfiniteHBD's JSON) instead of the mix",
    )
    parser.add_argument(
        "--faster", type=float, metavar="X", help="times as fast as the trace (default: by --every)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the score there")
    parser.add_argument("--hang", type=float, default=120.0, metavar="S", help="without a step")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all runs in a new DIR")
    parser.epilog = (
        "Jobs are started again, one after the other, until all faults have struck. "
        "Exit status: 0 all is as it must be, 1 a hang, lost or doubled samples, other losses, "
        "different hashes, a leak or a failed job, 2 wrong use."
    )


def run(args: argparse.Namespace) -> int:
    """Run the jobs, print the score; whether anything is as it must not be."""
    import asyncio
    import shutil

    import msgspec

    from resihp.chaos.play import Chaos, Limits
    from resihp.chaos.score import total

    job = _job(args)
    source, strikes = _faults(args, job.parallel.world)
    print(source, flush=True)
    folder = _folder(args.keep)
    num_faults = args.faults if args.faults or args.minutes else DEFAULT_FAULTS
    seconds = None if args.minutes is None else 60 * args.minutes
    chaos = Chaos(job, folder, Limits(num_faults, seconds, args.hang), _say)
    scores = asyncio.run(chaos.run(strikes))
    score = total(scores, seed=args.seed, source=source, seconds=chaos.seconds)
    print(f"\n{score.text}")
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(score), indent=2) + b"\n")
    if score.violations or args.keep is not None:
        print(f"runs: {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if score.violations else 0


def _say(line: str) -> None:
    print(line, flush=True)


def _job(args: argparse.Namespace) -> JobConfig:
    """The job with the numbers of the command line, which are checked."""
    import msgspec

    from resihp.config import load
    from resihp.errors import UserError

    for name in ("faults", "minutes", "every", "faster", "hang", "steps"):
        value = getattr(args, name)
        if value is not None and not 0 < value < MOST:
            raise UserError(f"--{name} {value}: must be more than 0 and less than {MOST:,}")
    job = load(args.job)
    if args.steps is None:
        return job
    section = msgspec.structs.replace(job.job, steps=args.steps)
    return msgspec.structs.replace(job, job=section)


def _faults(args: argparse.Namespace, world: int) -> tuple[str, Iterator[Strike]]:
    """Where the faults come from, in words, and the faults."""
    import itertools
    import random

    from resihp.chaos.mix import LLAMA_3, drawn
    from resihp.chaos.trace import mean_distance_s, read_trace, strikes_of
    from resihp.config import FAULT_KINDS, FaultKind
    from resihp.errors import UserError

    wanted: list[str] = args.kinds.split(",") if args.kinds else list(FAULT_KINDS)
    for word in wanted:
        if word not in FAULT_KINDS:
            raise UserError(f"--kinds: {word} is no kind of fault; kinds: {', '.join(FAULT_KINDS)}")
    kinds: list[FaultKind] = [kind for kind in FAULT_KINDS if kind in wanted]
    if args.trace is not None:
        events = read_trace(args.trace)
        faster = args.faster or mean_distance_s(events) / args.every
        source = f"{args.trace.name}, {faster:,.0f} times as fast"
        return source, strikes_of(events, world, faster, kinds)
    mix = [cause for cause in LLAMA_3 if cause.kind in kinds]
    if not mix:
        raise UserError(f"--kinds {args.kinds}: the mix has none of them")
    draw = random.Random(args.seed)
    strikes = (drawn(draw, world, args.every, mix) for _ in itertools.count())
    left_out = sum(cause.weight for cause in LLAMA_3) - sum(cause.weight for cause in mix)
    lines = [f"{cause.weight:4d}  {cause.name:<34} {cause.kind}" for cause in mix]
    lines.append(f"{left_out:4d}  left out: of no kind of ours, or not wanted")
    return "\n".join(["Weights: interruptions of Llama 3 405B in 54 days", *lines]), strikes


def _folder(keep: Path | None) -> Path:
    """Where runs are."""
    import tempfile

    from resihp.errors import UserError

    if keep is None:
        return Path(tempfile.mkdtemp(prefix="resihp-chaos-"))
    try:
        keep.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--keep {keep}: {error.strerror}") from error
    return keep.absolute()
