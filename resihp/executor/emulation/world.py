"""All ranks of a plan on emulated devices in one process, each with the real interpreter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from resihp.executor.device.interface import Tag
from resihp.executor.emulation.clock import Clock
from resihp.executor.emulation.stream import EmulatedStream, LocalMeeting, Meeting
from resihp.executor.emulation.times import RankTimes
from resihp.executor.emulation.wire import EmulatedWire, Post
from resihp.executor.emulation.work import EmulatedWork
from resihp.executor.interpreter.run import Interpreter
from resihp.ir.expand import expand
from resihp.ir.model import GroupName, Op, Plan
from resihp.ir.placement import placement_of
from resihp.ir.program import Program

__all__ = ["EmulatedRank", "Iteration", "World"]


class EmulatedRank(NamedTuple):
    """One rank: its program, its device and its interpreter."""

    program: Program
    compute: EmulatedStream
    comm: EmulatedStream
    interpreter: Interpreter

    @property
    def num_queued(self) -> int:
        """Items of both streams that have not started."""
        return self.compute.num_queued + self.comm.num_queued


class Iteration(NamedTuple):
    """How one iteration went. Nanoseconds."""

    lasts_ns: int
    """From its common begin to the end of the last instruction of all, on the device clock."""
    host_ns: int
    """The same until the host has seen that instruction end; nothing in virtual time."""
    cpu_ns: int
    """Time of this process on a processor, from the begin on."""
    num_late: int
    """How often the host was late by more than a millisecond."""
    worst_late_ns: int
    """The most that it was late by in all iterations so far."""


class World:
    """The ranks of `plan`. To be made and used on one loop; `close` ends it.

    `seconds` are those of every instruction of each group's stream (`RankTimes`).
    """

    def __init__(self, plan: Plan, seconds: Mapping[GroupName, Sequence[float]]) -> None:
        self.clock = Clock()
        self._post = Post()
        self._meetings: dict[object, Meeting] = {}
        self._active = plan.active_ranks
        self._holders = _holders(plan)
        self.ranks: dict[int, EmulatedRank] = {}
        """By global number."""
        for group in plan.groups:
            for rank in group.ranks:
                self.ranks[rank] = self._rank(expand(plan, rank), group.ranks, seconds[group.name])

    def _rank(
        self, program: Program, group: Sequence[int], seconds: Sequence[float]
    ) -> EmulatedRank:
        compute, comm = (EmulatedStream(self.clock, program.rank) for _ in range(2))
        times = RankTimes(program, seconds)
        work = EmulatedWork(
            program,
            times,
            clock=self.clock,
            compute=compute,
            comm=comm,
            meetings=self._meeting,
            group=group,
            holders=self._holders,
            ranks=self._active,
        )

        def lasts_ns(tag: Tag) -> int:
            return times.of(Op(tag.kind), tag.stage, (tag.home, tag.microbatch))

        wire = EmulatedWire(program.rank, self.clock, self._post, lasts_ns)
        interpreter = Interpreter(program, work, compute=compute, comm=comm, wire=wire)
        return EmulatedRank(program, compute, comm, interpreter)

    def _meeting(self, tag: Tag, ranks: Sequence[int]) -> Meeting:
        name = tag, tuple(ranks)
        meeting = self._meetings.get(name)
        if meeting is None:
            meeting = self._meetings[name] = LocalMeeting(self.clock, ranks)
        return meeting

    async def iterate(self, step: int) -> Iteration:
        """Run one iteration on all ranks, which begin at one time, with their queues full.

        Raises what broke the first rank; in virtual time `Deadlock` comes out of the loop.
        """
        self._meetings.clear()
        late_before = self.clock.num_late
        for rank in self.ranks.values():
            rank.compute.hold()
            rank.comm.hold()
        async with asyncio.TaskGroup() as tasks:
            for rank in self.ranks.values():
                tasks.create_task(rank.interpreter.run(step))
            begin_ns = await self._begin()
            cpu_ns = time.process_time_ns()
        clock = self.clock
        end_ns = max(rank.compute.free_ns for rank in self.ranks.values())
        return Iteration(
            lasts_ns=end_ns - begin_ns,
            host_ns=0 if clock.is_virtual else clock.handled_ns - begin_ns,
            cpu_ns=time.process_time_ns() - cpu_ns,
            num_late=clock.num_late - late_before,
            worst_late_ns=clock.worst_late_ns,
        )

    async def _begin(self) -> int:
        """Let all streams go once everything is queued; the time."""
        queued, before = 0, -1
        while queued > before:
            await asyncio.sleep(0)
            before, queued = queued, sum(rank.num_queued for rank in self.ranks.values())
        begin_ns = self.clock.host_ns()
        for rank in self.ranks.values():
            rank.compute.release(begin_ns)
            rank.comm.release(begin_ns)
        return begin_ns

    def close(self) -> None:
        """Nothing of this world happens any more."""
        self.clock.close()


def _holders(plan: Plan) -> dict[int, list[int]]:
    """The ranks that hold each stage."""
    return {
        stage: [rank for group in plan.groups if group.pp == pp for rank in group.ranks]
        for stage, pp in enumerate(placement_of(plan).pp)
    }
