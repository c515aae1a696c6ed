"""One generation on one emulated rank: as `resihp.executor.session`, without groups and tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from resihp.config import JobConfig
from resihp.executor.boundary import Boundary
from resihp.executor.device.interface import Tag
from resihp.executor.emulation.clock import Clock
from resihp.executor.emulation.remote import RemoteMeeting, RemoteWire
from resihp.executor.emulation.state import EmulatedState
from resihp.executor.emulation.stream import EmulatedStream
from resihp.executor.emulation.times import RankTimes
from resihp.executor.emulation.work import EmulatedWork
from resihp.executor.inject import Injector
from resihp.executor.interpreter.run import Interpreter
from resihp.executor.iterations import iterate
from resihp.executor.joining import Joining
from resihp.executor.local_world import check_program
from resihp.executor.transport import Transport
from resihp.ir.model import Op, Plan
from resihp.ir.parser import parse
from resihp.ir.placement import placement_of
from resihp.ir.program import Program
from resihp.ir.program_bytes import decode_program
from resihp.ir.runnable import check_runnable
from resihp.wire.messages import At, Deploy, Emulation, Joined, Message

__all__ = ["EmulatedSession"]


class EmulatedSession:
    """Runs one deployed generation; made anew for each."""

    def __init__(
        self,
        job: JobConfig,
        rank: int,
        deploy: Deploy,
        *,
        state: EmulatedState,
        clock: Clock,
        compute: EmulatedStream,
        comm: EmulatedStream,
        transport: Transport,
        injector: Injector,
        send: Callable[[Message], None],
    ) -> None:
        self._job = job
        self._rank = rank
        self._deploy = deploy
        self._state = state
        self._clock = clock
        self._compute = compute
        self._comm = comm
        self._transport = transport
        self._injector = injector
        self._send = send
        self.joining = Joining(deploy.generation, "connects")
        self._interpreter: Interpreter | None = None

    def at(self) -> At:
        """Where it is; how long it has been there is for the caller to say."""
        return self.joining.at(self._interpreter)

    async def run(self) -> bool:
        """See `resihp.executor.runtime.Session`."""
        deploy, emulated = self._deploy, self._deploy.emulated
        assert emulated is not None, "deployed to a real device"
        plan = parse(deploy.plan).plan
        check_runnable(plan)
        if self._rank in plan.returned:
            self._state.forget()
        self._state.adopt(deploy.base, deploy.commit)
        program = None
        if deploy.program:
            program = decode_program(deploy.program)
            check_program(program, self._job, self._rank, deploy.peers)
        self._transport.begin(deploy.generation, deploy.key, deploy.peers)
        if program is not None:
            await self._transport.connect(_peers(plan, program))
        self.joining.doing = "moves state"
        moved_bytes = await self._move(emulated)
        self._state.prepare(deploy.generation, holds_layers=program is not None)
        self._send(Joined(generation=self.joining.generation, hashes={}, moved_bytes=moved_bytes))
        self.joining.doing = "waits for the others to join" if program is not None else "stands by"
        where = "standby" if program is None else str(program.group)
        print(f"generation {self.joining.generation}: emulated, {where}", flush=True)
        await self.joining.go
        self._state.go()
        if program is None:
            return False
        self._injector.num_instrs = len(program.instrs)
        self._interpreter = self._interpreter_of(plan, program, emulated)
        return await iterate(
            self._interpreter,
            self._state,
            num_steps=self._job.job.steps,
            generation=self.joining.generation,
            boundary=Boundary(self._state.agreement),
            send=self._send,
        )

    async def _move(self, emulated: Emulation) -> int:
        """Wait for the state that moves; what the first rank of the generation says of it."""
        if self._deploy.base == 0:
            return 0
        await asyncio.sleep(emulated.move_s)
        return emulated.moved_bytes if self._rank == self._deploy.store_rank else 0

    def _interpreter_of(self, plan: Plan, program: Program, emulated: Emulation) -> Interpreter:
        times = RankTimes(program, emulated.seconds[str(program.group)])
        group = plan.group_of(self._rank)
        assert group is not None

        def meeting(tag: Tag, ranks: Sequence[int]) -> RemoteMeeting:
            return RemoteMeeting(self._clock, self._transport, tag, ranks)

        def lasts_ns(tag: Tag) -> int:
            late_ns = round(1e9 * self._injector.conditions.link_delay_s.now)
            return times.of(Op(tag.kind), tag.stage, (tag.home, tag.microbatch)) + late_ns

        work = EmulatedWork(
            program,
            times,
            clock=self._clock,
            compute=self._compute,
            comm=self._comm,
            meetings=meeting,
            group=group.ranks,
            holders={stage: _holders(plan, stage) for stage in program.stages},
            ranks=plan.active_ranks,
            ledger=self._state,
        )
        wire = RemoteWire(self._clock, self._transport, lasts_ns)
        return Interpreter(
            program,
            work,
            compute=self._compute,
            comm=self._comm,
            wire=wire,
            before=self._injector.before,
        )

    async def leave(self) -> None:
        """Stop everything of this generation; returns when both streams are idle."""
        self._compute.cancel()
        self._comm.cancel()
        self._transport.end()
        self.joining.close()
        await self._compute.when_idle().wait_async()
        await self._comm.when_idle().wait_async()
        if self._interpreter is not None:
            self._interpreter.discard()
        self._compute.reset()
        self._comm.reset()


def _holders(plan: Plan, stage: int) -> list[int]:
    """The ranks that hold a stage."""
    pp = placement_of(plan).pp[stage]
    return [rank for group in plan.groups if group.pp == pp for rank in group.ranks]


def _peers(plan: Plan, program: Program) -> set[int]:
    """Whom this rank sends to: its neighbours, and the first member of each of its meetings."""
    group = plan.group_of(program.rank)
    assert group is not None
    meetings = [list(group.ranks), list(plan.active_ranks)]
    meetings += (_holders(plan, stage) for stage in program.stages)
    members = {
        peer for ranks in meetings for peer in (ranks if ranks[0] == program.rank else ranks[:1])
    }
    return (members | program.send_targets) - {program.rank}
