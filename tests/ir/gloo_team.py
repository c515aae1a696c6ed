"""Processes that run plans for real, one plan after the other, and what came of each.

One process imports torch and forks all others, so that a new team costs milliseconds. A team is
used as long as everything ends: then each rank has waited for all that it posted, and nothing is
left of one plan when the next one starts. After a hang or an error its processes are killed and a
new team is forked, since a broken gloo group cannot be mended.

A plan hangs if every rank that has not ended waits and none moves for a while. Each rank says in
shared memory how often it has moved and whether it waits.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from gloo_model import reference_gradients, sizes_of, stacked
from gloo_rank import Rank, Wire
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from resihp.executor.groups import open_store
from resihp.ir.model import Plan
from resihp.wire.address import LOOPBACK

TOLERANCE = 1e-9
"""Of gradients, relative to the largest."""
FAR = timedelta(minutes=10)


class Outcome(NamedTuple):
    """What came of a plan."""

    verdict: str
    """`right`, `wrong` (another gradient, or none), `hang` or `error`."""
    detail: str = ""


def _serve(number: int, size: int, port: int, prefix: str, pipe: Connection, moves: Any) -> None:
    """The process of one rank: run what comes until the pipe closes or something fails."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # gloo ends a process that gets a wrong size
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=FAR)
    group = ProcessGroupGloo(PrefixStore(prefix, store), number, size, FAR)

    def wait_for(work: Any) -> None:
        moves[2 * number + 1] = 1
        work.wait(FAR)
        moves[2 * number + 1] = 0
        moves[2 * number] += 1

    def progress(_: int) -> None:
        moves[2 * number] += 1

    while True:
        try:
            plan, rank, numbers = pipe.recv()
        except EOFError:
            os._exit(0)  # a normal exit would wait for a group that is stuck
        try:
            gradients = Rank(plan, rank, numbers, Wire(group, number, wait_for)).run(progress)
            pipe.send({stage: gradient.tolist() for stage, gradient in gradients.items()})
        except Exception as error:
            pipe.send(f"rank {rank}: {type(error).__name__}: {error}")


class _Team:
    """The processes 0 .. size - 1."""

    def __init__(self, size: int, port: int, prefix: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        self.moves = context.RawArray("q", 2 * size)
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for number in range(size):
            ours, theirs = context.Pipe()
            arguments = (number, size, port, prefix, theirs, self.moves)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def kill(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()


class Runner:
    """Where plans are run. Use it in a `with`."""

    def __init__(self, size: int = 6) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._size = size
        self._store, self._port = open_store(FAR.total_seconds())
        self._team: _Team | None = None
        self.num_teams = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_team()

    def run(self, plan: Plan, quiet_s: float = 1.0) -> Outcome:
        """Run `plan`; it hangs if nobody moves for `quiet_s`."""
        numbers = {rank: number for number, rank in enumerate(plan.active_ranks)}
        assert len(numbers) <= self._size
        if self._team is None:
            self.num_teams += 1
            self._team = _Team(self._size, self._port, f"team{self.num_teams}")
        for rank, number in numbers.items():
            self._team.pipes[number].send((plan, rank, numbers))
        ended = self._watch(self._team, len(numbers), quiet_s)
        if not isinstance(ended, Outcome):
            return _compared(plan, ended)
        self._end_team()
        return ended

    def _watch(
        self, team: _Team, num_ranks: int, quiet_s: float
    ) -> Outcome | dict[int, Mapping[int, list[float]]]:
        """What every rank ended with, by number; or that one failed, or that all hang."""
        running = {team.pipes[number]: number for number in range(num_ranks)}
        ended: dict[int, Mapping[int, list[float]]] = {}
        seen, since = list(team.moves), time.monotonic()
        while running:
            for pipe in wait(list(running), timeout=quiet_s / 10):
                assert isinstance(pipe, Connection)
                number = running.pop(pipe)
                try:
                    reply = pipe.recv()
                except EOFError:
                    return Outcome("error", f"process {number} died")
                if isinstance(reply, str):
                    return Outcome("error", reply)
                ended[number] = reply
            now = list(team.moves)
            all_wait = all(now[2 * number + 1] for number in running.values())
            if now != seen or not all_wait:
                seen, since = now, time.monotonic()
            elif running and time.monotonic() - since > quiet_s:
                return Outcome("hang", f"{sorted(running.values())} wait")
        return ended

    def _end_team(self) -> None:
        if self._team is not None:
            self._team.kill()
            self._team = None


def _compared(plan: Plan, ended: Mapping[int, Mapping[int, list[float]]]) -> Outcome:
    """Whether all ranks stepped with the reference gradient."""
    reference = reference_gradients(sizes_of(plan), plan.model.layers)
    worst = 0.0
    placed = sorted({layers for group in plan.groups for layers in group.layers})
    for number, rank in enumerate(plan.active_ranks):
        group = plan.group_of(rank)
        assert group is not None
        for layers in group.layers:
            found = ended[number].get(placed.index(layers))
            if found is None:
                return Outcome("wrong", f"rank {rank} steps without gradients of {layers}")
            expected = stacked(reference[layers.first : layers.last + 1])
            worst = max(worst, _distance(torch.tensor(found, dtype=torch.float64), expected))
    return Outcome("right" if worst <= TOLERANCE else "wrong", f"off by {worst:.1e}")


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
