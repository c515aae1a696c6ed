"""The process of one rank, started by torchrun or `resihp train`: `-m resihp.worker job.toml`.

It is only a supervisor: torchrun ends all workers 0.1 s after one of them dies, so the process
that may die, the executor, is its child. RANK and WORLD_SIZE come from the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from resihp.config import JobConfig, load, resolved
from resihp.errors import ConfigError, CoordinatorLost, ResihpError, UserError
from resihp.monitor.endings import Endings
from resihp.monitor.exit_barrier import answer_for_lost
from resihp.monitor.node.brief import Brief
from resihp.monitor.node.owner import NodeOwner
from resihp.monitor.private_file import job_secret
from resihp.monitor.rendezvous import (
    Place,
    forget_restarts,
    inherited,
    inherited_from_launcher,
    read_place,
    rendezvous_path,
    write_place,
)
from resihp.monitor.run_dir import announce_run
from resihp.monitor.supervisor import Supervisor
from resihp.wire.address import LOOPBACK, address_of, listen_at
from resihp.wire.auth import new_secret
from resihp.wire.clock import MonotonicClock
from resihp.wire.console import complain
from resihp.wire.loop import run
from resihp.wire.timing import Timing

__all__ = ["main"]

PLACE_POLL_S = 0.02


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; the exit code of the job."""
    parser = argparse.ArgumentParser(prog="resihp.worker", description="Run one rank of a job.")
    parser.add_argument("job", help="the job file (TOML)")
    parser.add_argument("--no-inject", action="store_true", help="leave out injected faults")
    args = parser.parse_args(argv)
    rank = -1
    try:
        job = load(args.job)
        if args.no_inject:
            job = msgspec.structs.replace(job, inject=())
        rank = _rank(os.environ, job)
        if _is_first_here(os.environ, rank) and not inherited_from_launcher(os.environ):
            from resihp.monitor.preflight import check_job  # the compiler with it: one rank's work

            check_job(job, args.job)  # `resihp train` did it before it started us
        return run(_run(job, rank))
    except CoordinatorLost as error:
        if inherited_from_launcher(os.environ):
            return error.exit_code  # `resihp train` says it once for all ranks
        complain(f"resihp: error: rank {rank}: {error}")
        return error.exit_code
    except ResihpError as error:
        complain(f"resihp: error: {error}")
        return error.exit_code


def _is_first_here(env: Mapping[str, str], rank: int) -> bool:
    return int(env.get("LOCAL_RANK", rank)) == 0


def _rank(env: Mapping[str, str], job: JobConfig) -> int:
    """Our rank, checked against the job. ConfigError where the launch does not fit it."""
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} not set: start this module with torchrun "
            "(torchrun --nproc-per-node=N -m resihp.worker job.toml) or use `resihp train job.toml`"
        )
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    wanted = job.parallel.world
    if world != wanted:
        shape = f"tp {job.parallel.tp} x pp {job.parallel.pp} x dp {job.parallel.dp}"
        raise ConfigError(
            f"{world} workers were started, the job needs {shape} = {wanted}: "
            f"use --nproc-per-node={wanted}"
        )
    if not inherited_from_launcher(env):
        _check_nodes(int(env.get("LOCAL_WORLD_SIZE", world)), job)
    return rank


def _check_nodes(num_local: int, job: JobConfig) -> None:
    """Every node has equally many ranks, and is in the job file where there are several."""
    world, num_nodes = job.parallel.world, max(1, len(job.network.nodes))
    if num_local * num_nodes != world:
        each = world // num_nodes
        raise ConfigError(
            f"{num_local} workers were started on this node; the job has {world} ranks on "
            f"{num_nodes} node{'s' if num_nodes > 1 else ''} of [network] nodes: "
            f"use --nnodes={num_nodes} --nproc-per-node={each}"
        )


async def _run(job: JobConfig, rank: int) -> int:
    handed_down = inherited(os.environ)
    if handed_down is not None:
        return await _supervise(job, rank, handed_down.place, None, handed_down.was_restarted)
    path = rendezvous_path(os.environ, os.getppid())
    node = int(os.environ.get("GROUP_RANK", "0"))
    nodes = job.network.nodes
    # One agent starts all its ranks again with a new run. With several, the others go on.
    is_return = len(nodes) > 1 and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if not _is_first_here(os.environ, rank):
        return await _supervise(job, rank, path, None, is_return)
    host, port = _addresses(job)[node] if nodes else (LOOPBACK, 0)
    with listen_at(host, port) as listener:
        here = address_of(listener)
        place = Place(here.port, job_secret(job) if nodes else new_secret(), here.host)
        forget_restarts(path, os.environ)
        write_place(path, place)
        brief = Brief(
            job=resolved(job),
            secret=place.secret,
            node=node,
            addresses=_addresses(job) or ((place.host, place.port),),
            run_dir=None if node or is_return else str(announce_run(job).path),
        )
        timing = Timing.from_detect_within(job.job.detect_within_s)
        owner = NodeOwner(brief, listener, timing)
        try:
            code = await _supervise(job, rank, place, owner, is_return)
            await answer_for_lost(os.environ, node, len(nodes), owner.lost_nodes)
            return code
        finally:
            path.unlink(missing_ok=True)


def _addresses(job: JobConfig) -> tuple[tuple[str, int], ...]:
    assert job.network.port is not None or not job.network.nodes
    return tuple((host, job.network.port or 0) for host in job.network.nodes)


async def _supervise(
    job: JobConfig,
    rank: int,
    place: Place | Path,
    owner: NodeOwner | None,
    was_restarted: bool = False,
) -> int:
    """Run the supervisor, and beside it the node's monitor where we own that."""
    supervisor = Supervisor(job, rank, MonotonicClock(), was_restarted=was_restarted)
    timing = Timing.from_detect_within(job.job.detect_within_s)

    async def find_place() -> Place:
        async with asyncio.timeout(timing.start_s):
            while True:
                found = place if isinstance(place, Place) else read_place(place)
                if found is not None:
                    return found
                await asyncio.sleep(PLACE_POLL_S)

    _handle_signals(supervisor, owner)
    if owner is None:
        return await supervisor.run(find_place)
    serving = asyncio.create_task(supervisor.run(find_place))
    owning = asyncio.create_task(owner.run())
    try:
        await asyncio.wait([serving, owning], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        return await owning
    finally:
        # Whichever ended first: the other one ends by itself, or is ended.
        await asyncio.wait([serving], timeout=2 * timing.grace_s)
        for task in (serving, owning):
            task.cancel()
        await asyncio.gather(serving, owning, return_exceptions=True)


def _handle_signals(supervisor: Supervisor, owner: NodeOwner | None) -> None:
    def ask(number: signal.Signals) -> None:
        if owner is not None:
            owner.send(number)
        else:
            supervisor.ask_stop(f"stopped by {number.name}", 128 + number)

    Endings(ask, lambda: supervisor.kill_executor("told to end at once"))


if __name__ == "__main__":
    sys.exit(main())
