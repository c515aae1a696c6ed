"""One generation on one rank: from the plan that was deployed to the iterations that it runs.

    adopt the common version -> build groups -> connect -> move state -> joined
        -> (go) -> iterate -> finished

Any step may end with a closed generation; `leave` then stops everything of it within the time
of the chunk that runs, and nothing of it can reach the next one.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import msgspec

from resihp.config import JobConfig
from resihp.errors import GenerationClosed
from resihp.executor.arrival import Arrival
from resihp.executor.audit import Audit
from resihp.executor.boundary import Boundary
from resihp.executor.device.interface import Communicator, Device, Groups
from resihp.executor.groups import Communicator as CountedCommunicator
from resihp.executor.groups import open_store
from resihp.executor.held import Keep
from resihp.executor.inject import Injector
from resihp.executor.injected import InjectedWire, InjectedWork
from resihp.executor.injected_disk import InjectedDisk
from resihp.executor.interpreter.run import Interpreter
from resihp.executor.iterations import iterate
from resihp.executor.joining import Joining
from resihp.executor.local_world import check_program
from resihp.executor.memberships import memberships
from resihp.executor.model import Model
from resihp.executor.sampler import GlobalBatches
from resihp.executor.saver import Saver
from resihp.executor.snapshots.generation import GenerationSnapshots
from resihp.executor.state import Holding, TrainState, shard_hashes
from resihp.executor.stream import Stream
from resihp.executor.threads import in_thread
from resihp.executor.training import TrainingWork
from resihp.ir.model import Plan
from resihp.ir.parser import parse
from resihp.ir.program import Program
from resihp.ir.program_bytes import decode_program
from resihp.ir.runnable import check_runnable
from resihp.wire.console import say
from resihp.wire.messages import (
    At,
    Deploy,
    Joined,
    Message,
    StoreOpened,
)
from resihp.wire.timing import Timing

__all__ = ["Session"]

ABORT_RETRY_S = 0.25
DUMP_AFTER_ATTEMPTS = 12


class Session:
    """Runs one deployed generation; made anew for each."""

    def __init__(
        self,
        job: JobConfig,
        rank: int,
        deploy: Deploy,
        *,
        model: Model,
        state: TrainState,
        device: Device,
        batches: GlobalBatches,
        injector: Injector,
        send: Callable[[Message], None],
    ) -> None:
        self._job = job
        self._model = model
        self._rank = rank
        self._deploy = deploy
        self._state = state
        self._device = device
        self._batches = batches
        self._injector = injector
        self._send = send
        self._timing = Timing.from_detect_within(job.job.detect_within_s)
        self.joining = Joining(deploy.generation, "builds groups")
        self._arrival = Arrival(
            job, model, rank, deploy, state=state, device=device, joining=self.joining, send=send
        )
        self._store: Any = None
        self._groups: Groups | None = None
        self._tp: CountedCommunicator | None = None
        """That of the TP group, where entering it is counted."""
        self._interpreter: Interpreter | None = None
        self._work: TrainingWork | None = None
        self._saver: Saver | None = None
        self._snapshots: GenerationSnapshots | None = None
        self._left = False

    def at(self) -> At:
        """Where it is; how long it has been there is for the caller to say."""
        at = self.joining.at(self._interpreter)
        if self._tp is None:
            return at
        return msgspec.structs.replace(at, collectives=self._tp.num_entered)

    async def run(self) -> bool:
        """See `resihp.executor.runtime.Session`."""
        deploy, state = self._deploy, self._state
        plan = parse(deploy.plan).plan
        check_runnable(plan)
        await self._arrival.adopt(plan)
        if not deploy.program:
            await self._stand_by(plan)
            return False
        program = self._program(deploy.program)
        steady: tuple[Plan, Program] | None = None
        if deploy.steady_program:
            steady = parse(deploy.steady_plan).plan, self._program(deploy.steady_program)
        self._device.begin(deploy.generation, deploy.key, deploy.peers)
        redone = state.version if deploy.base else -1
        keep = self._keep(plan, program)
        await self._injector.joining("groups", redone)
        lasting_plan, lasting = steady or (plan, program)
        # Both plans have the same groups. What is left of an iteration may take other ways.
        groups = await self._build_groups(lasting_plan, program.send_targets | lasting.send_targets)
        self.joining.doing = "moves state"
        await self._injector.joining("state", redone)
        holding, moved_bytes = await self._arrival.move(plan, program)
        assert holding is not None
        hashes = await self._device.comm.submit(
            lambda: shard_hashes(self._model, holding, plan.mesh.tp)
        ).wait_async()
        state.prepare(deploy.generation, holding)
        self._snapshots = GenerationSnapshots(
            self._model,
            plan,
            state,
            self._device,
            deploy.peers,
            wants_buddy=self._job.state.buddy,
            tell=self._send,
        )
        await self._snapshots.secure()
        self._send(Joined(generation=deploy.generation, hashes=hashes, moved_bytes=moved_bytes))
        self._saver = self._make_saver(plan)
        self.joining.doing = "waits for the others to join"
        await self._injector.joining("joined", redone)
        self._log(
            f"{program.group} member {program.tp_index} of {program.tp}, "
            f"layers {', '.join(map(str, program.layers))}, from step {state.version}, "
            f"{moved_bytes} bytes of state received"
        )
        await self.joining.go
        state.go(keep and keep.held)
        await self._snapshots.begin()
        return await iterate(
            await self._make_interpreter(plan, holding, groups, keep),
            state,
            num_steps=self._job.job.steps,
            generation=self._deploy.generation,
            boundary=self._boundary(plan, groups),
            send=self._send,
            steady=steady and partial(self._after_redone, *steady, holding, groups),
        )

    def _program(self, encoded: bytes) -> Program:
        program = decode_program(encoded)
        check_program(program, self._job, self._rank, self._deploy.peers)
        return program

    def _keep(self, plan: Plan, program: Program) -> Keep | None:
        """What the iteration that `plan` redoes begins with here."""
        if plan.resume is None or not plan.resume.keep:
            return None
        num, held = plan.batch.microbatches, self._state.held
        keep = Keep(plan.resume.step, self._deploy.kept, held, num)
        keep.check(program.stages, program.group.replica)
        return keep

    async def _after_redone(
        self, plan: Plan, program: Program, holding: Holding, groups: dict[str, Communicator]
    ) -> Interpreter:
        """For the plan that follows the iteration that was redone, with the same groups."""
        self._state.held = None
        return await self._make_interpreter(plan, holding._replace(program=program), groups, None)

    def _make_saver(self, plan: Plan) -> Saver | None:
        """None where nothing is saved."""
        at = self._deploy.save_at
        if at is None:
            return None
        saver = Saver(
            self._model,
            plan,
            self._rank,
            self._state,
            self._device,
            at,
            self._deploy.generation,
            self._send,
            every=self._job.checkpoint.every,
            num_steps=self._job.job.steps,
            disk=InjectedDisk(self._injector.conditions),
        )
        saver.prepare()
        return saver

    def _boundary(self, plan: Plan, groups: dict[str, Communicator]) -> Boundary:
        """What is done between iterations."""
        agreement, saver = self._state.agreement, self._saver
        audit = Audit(
            self._model,
            plan,
            self._state,
            self._device,
            groups["world"],
            self._send,
            generation=self._deploy.generation,
            every=self._job.state.audit_every,
        )
        if saver is None:
            return Boundary(agreement, [audit.cross])
        return Boundary(agreement, [audit.cross, saver.cross], [saver.finish])

    async def _stand_by(self, plan: Plan) -> None:
        """Without a place in the plan: give away what others need, then wait."""
        deploy = self._deploy
        self._device.begin(deploy.generation, deploy.key, deploy.peers)
        self.joining.doing = "moves state"
        await self._arrival.move(plan, None)
        self.joining.doing = "stands by"
        self._state.prepare(deploy.generation, None)
        self._send(Joined(generation=self._deploy.generation, hashes={}, moved_bytes=0))
        self._log("standby")
        await self.joining.go
        self._state.go()

    def _log(self, line: str) -> None:
        """Into this rank's log file."""
        say(f"generation {self._deploy.generation}: {line}")

    # --- joining

    async def _build_groups(
        self, plan: Plan, send_targets: AbstractSet[int]
    ) -> dict[str, Communicator]:
        """All groups of this rank by role, in an order that is the same on every rank.

        On GPUs pairs of ranks are linked for `plan` alone.
        """
        timing = self._timing
        if self._deploy.store_rank == self._rank:
            host = self._device.host
            self._store, opened = await in_thread(lambda: open_store(timing.join_s, host))
            self._send(StoreOpened(generation=self._deploy.generation, address=opened))
        store = await self.joining.store

        def build() -> dict[str, Communicator]:
            factory = self._device.groups(
                store,
                self._deploy.generation,
                self._rank,
                connect_s=timing.join_s,
                collective_s=timing.collective_s,
            )
            self._groups = factory
            if self._left:  # closed while we connected: `leave` did not see these groups
                factory.release()
                raise GenerationClosed("the generation is over")
            built = {
                role: factory.build(name, ranks)
                for role, name, ranks in memberships(self._model, plan, self._rank)
            }
            self._device.link(factory, plan)
            return built

        parts = await in_thread(build)
        tp = parts["tp"]
        self._tp = tp if isinstance(tp, CountedCommunicator) else None
        await self._device.connect(send_targets)
        return parts

    async def _make_interpreter(
        self,
        plan: Plan,
        holding: Holding,
        groups: dict[str, Communicator],
        keep: Keep | None,
    ) -> Interpreter:
        def make() -> TrainingWork:
            return TrainingWork(
                self._model,
                plan,
                holding,
                self._state,
                self._batches,
                groups,
                numerics=self._job.compute.numerics,
                device=self._device.torch_device,
                keep=keep,
            )

        # It makes buffers that the compute stream uses first, so that is where they are made.
        work = await self._device.compute.submit(make).wait_async()
        self._work = work
        self._injector.num_instrs = len(holding.program.instrs)
        self._interpreter = Interpreter(
            holding.program,
            InjectedWork(work, self._injector),
            compute=self._device.compute,
            comm=self._device.comm,
            wire=InjectedWire(self._device.wire, self._injector.conditions),
            before=self._injector.before,
        )
        return self._interpreter

    # --- leaving

    async def leave(self) -> None:
        """Stop everything of this generation; returns when both streams are idle."""
        self._left = True
        if self._snapshots is not None:
            self._snapshots.end()
        if self._saver is not None:
            self._saver.close()
        streams = self._device.compute, self._device.comm
        for stream in streams:
            stream.cancel()
        self._device.end()
        self.joining.close()
        self._store = None  # wakes peers that still connect through it
        idle = asyncio.ensure_future(_idle(streams))
        for attempt in itertools.count(1):
            if self._groups is not None:
                self._groups.abort()
            await asyncio.wait([idle], timeout=ABORT_RETRY_S)
            if idle.done():
                break
            if attempt == DUMP_AFTER_ATTEMPTS:
                faulthandler.dump_traceback(all_threads=True)  # where it hangs, into our log
        self._release_groups()
        if self._interpreter is not None:
            assert self._work is not None
            self._state.held = self._work.held() or self._state.held
            self._interpreter.discard()
        for stream in streams:
            stream.reset()

    def _release_groups(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            threading.Thread(target=groups.release, daemon=True).start()


async def _idle(streams: Sequence[Stream]) -> None:
    """Wait until nothing runs on any of them."""
    for stream in streams:
        await stream.when_idle().wait_async()
