"""How one rank gets to the state that a generation begins with, in the layout of its plan.

It adopts the version that all settled on, and then has what it lacks of the new layout: made anew
where the job begins, read from a saved version, or moved from those who hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from resihp.config import JobConfig
from resihp.errors import CheckpointRefused, GenerationClosed, OtherModel
from resihp.executor.before import Before
from resihp.executor.device.interface import Device
from resihp.executor.joining import Joining
from resihp.executor.model import Model
from resihp.executor.reshard import Resharding
from resihp.executor.state import Holding, TrainState, initial_holding
from resihp.executor.threads import in_thread
from resihp.ir.model import Plan
from resihp.ir.program import Program
from resihp.wire.messages import Deploy, Message, VersionRefused

__all__ = ["Arrival"]


class Arrival:
    """Of one generation on one rank."""

    def __init__(
        self,
        job: JobConfig,
        model: Model,
        rank: int,
        deploy: Deploy,
        *,
        state: TrainState,
        device: Device,
        joining: Joining,
        send: Callable[[Message], None],
    ) -> None:
        self._job = job
        self._model = model
        self._rank = rank
        self._deploy = deploy
        self._state = state
        self._device = device
        self._joining = joining
        self._send = send
        self._before = Before(model, job, deploy.previous_plan, rank, device.torch_device)

    async def adopt(self, plan: Plan) -> None:
        """See `TrainState.adopt`."""
        deploy, state = self._deploy, self._state
        if self._rank in plan.returned or deploy.commit.saved:
            state.forget()
        # It may update parameters, which is work for a stream of the device.
        adopted = self._device.comm.submit(
            lambda: state.adopt(deploy.base, deploy.commit, self._before.room)
        )
        await adopted.wait_async()

    async def move(self, plan: Plan, program: Program | None) -> tuple[Holding | None, int]:
        """What this rank holds in `plan` (None: standby), and the bytes that came for it.

        What others lack is given away. Raises as `Resharding.run` does, and GenerationClosed where
        the saved version that all begin with cannot be read; the coordinator is told.
        """
        deploy, state, previous = self._deploy, self._state, self._before.plan
        if deploy.base == 0 or previous is None:
            return (None, 0) if program is None else await self._begin(program)
        resharding = Resharding(
            self._model, self._job, previous, plan, self._rank, self._device.torch_device
        )
        await self._device.connect(resharding.peers)
        holding = await resharding.run(
            state.current,
            program,
            self._device.wire,
            self._device.comm,
            partial(self._before.lost, state.snapshots, deploy.base, deploy.commit.version),
        )
        return holding, resharding.received_bytes

    async def _begin(self, program: Program) -> tuple[Holding, int]:
        if self._deploy.commit.saved:
            return await self._load(program)
        where = self._device.torch_device
        made = self._device.comm.submit(
            lambda: initial_holding(self._model, self._job, program, where)
        )
        return await made.wait_async(), 0

    async def _load(self, program: Program) -> tuple[Holding, int]:
        from resihp.executor.checkpoint.loading import load_holding

        deploy = self._deploy
        assert deploy.save_at is not None
        version = Path(deploy.save_at.directory) / deploy.commit.saved
        config, where = self._job.optimizer, self._device.torch_device
        self._joining.doing = "reads a saved version"
        try:
            loaded = await in_thread(
                lambda: load_holding(self._model, config, program, version, where)
            )
        except (CheckpointRefused, OSError) as error:
            # All go on from another version, so that is the coordinator's to say.
            self._send(
                VersionRefused(
                    generation=deploy.generation,
                    name=deploy.commit.saved,
                    why=str(error),
                    is_other_model=isinstance(error, OtherModel),
                )
            )
            raise GenerationClosed("its saved version was refused") from error
        return loaded.holding, loaded.num_bytes
