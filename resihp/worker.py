"""The process of one rank, started by torchrun or `resihp train`: `-m resihp.worker job.toml`.

It is only a supervisor: torchrun ends all workers 0.1 s after one of them dies, so the process
that may die, the executor, is its child. RANK and WORLD_SIZE come from the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from resihp.config import JobConfig, load
from resihp.errors import ConfigError, CoordinatorLost, ResihpError, UserError
from resihp.monitor.coordinator import Coordinator
from resihp.monitor.planner import Planner
from resihp.monitor.preflight import check_job
from resihp.monitor.process import ENDINGS
from resihp.monitor.rendezvous import (
    Place,
    inherited,
    inherited_from_launcher,
    listen,
    publish,
    read_place,
    rendezvous_path,
)
from resihp.monitor.run_dir import RunDir
from resihp.monitor.server import CoordinatorServer
from resihp.monitor.supervisor import Supervisor
from resihp.wire.clock import MonotonicClock
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
        if rank == 0 and not inherited_from_launcher(os.environ):
            check_job(job, args.job)  # `resihp train` did it before it started us
        return asyncio.run(_run(job, rank))
    except CoordinatorLost as error:
        if inherited_from_launcher(os.environ):
            return error.exit_code  # `resihp train` says it once for all ranks
        print(f"resihp: error: rank {rank}: {error}", file=sys.stderr)
        return error.exit_code
    except ResihpError as error:
        print(f"resihp: error: {error}", file=sys.stderr)
        return error.exit_code


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
    if int(env.get("LOCAL_WORLD_SIZE", world)) != world:
        raise UserError("this version runs on one node: start all workers on one machine")
    return rank


async def _run(job: JobConfig, rank: int) -> int:
    handed_down = inherited(os.environ)
    if handed_down is not None:
        listener = None
        if handed_down.listen_fd is not None:
            listener = socket.socket(fileno=handed_down.listen_fd)
        return await _supervise(job, rank, handed_down.place, listener)
    path = rendezvous_path(os.environ, os.getppid())
    if rank != 0:
        return await _supervise(job, rank, path, None)
    listener = listen()
    place = publish(path, listener.getsockname()[1])
    try:
        return await _supervise(job, rank, place, listener)
    finally:
        path.unlink(missing_ok=True)


async def _supervise(
    job: JobConfig, rank: int, place: Place | Path, listener: socket.socket | None
) -> int:
    """Run the supervisor, and beside it the coordinator where we own the listening socket."""
    clock = MonotonicClock()
    supervisor = Supervisor(job, rank, clock)
    timing = Timing.from_detect_within(job.job.detect_within_s)

    async def find_place() -> Place:
        async with asyncio.timeout(timing.start_s):
            while True:
                found = place if isinstance(place, Place) else read_place(place)
                if found is not None:
                    return found
                await asyncio.sleep(PLACE_POLL_S)

    server = None
    if listener is not None:
        assert isinstance(place, Place)
        server = _server(job, place.secret, clock)
    _handle_signals(supervisor, server)
    serving = asyncio.create_task(server.serve(listener)) if server and listener else None
    try:
        code = await supervisor.run(find_place)
    except CoordinatorLost:
        if serving is None:
            raise
        code = 1
    return await serving if serving is not None else code


def _server(job: JobConfig, secret: bytes, clock: MonotonicClock) -> CoordinatorServer:
    run_dir = RunDir.create(job)
    coordinator = Coordinator(job, Planner(job), secret, clock.now_s())
    _say(f"run directory: {run_dir.path}")
    say = _say_emulated if job.device.kind == "emulated" else _say
    return CoordinatorServer(job, coordinator, run_dir, secret, clock, say)


def _say(line: str) -> None:
    print(line, flush=True)


def _say_emulated(line: str) -> None:
    """No line of an emulated job can be taken for one of a real run."""
    _say(line if "emulated" in line else f"emulated: {line}")


def _handle_signals(supervisor: Supervisor, server: CoordinatorServer | None) -> None:
    """The first SIGINT or SIGTERM ends the job in order, the second one at once."""
    loop = asyncio.get_running_loop()
    seen: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        code = 128 + number
        if seen:
            supervisor.kill_executor()
            os._exit(code)
        seen.append(number)
        if server is not None:
            server.stop(f"stopped by {number.name}", code)
            supervisor.give_up(code)
        else:
            supervisor.ask_stop(f"stopped by {number.name}", code)

    for number in ENDINGS:
        loop.add_signal_handler(number, stop, number)
    # `resihp train` started us with both blocked, so that none could come too early.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)


if __name__ == "__main__":
    sys.exit(main())
