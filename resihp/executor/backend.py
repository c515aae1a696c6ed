"""The training backend of an executor: its device, state and data."""

from __future__ import annotations

from collections.abc import Callable

from resihp.config import JobConfig
from resihp.executor.data import Dataset, load_dataset
from resihp.executor.device.choose import device_of
from resihp.executor.inject import Injector, announcer
from resihp.executor.injected_disk import InjectedDisk
from resihp.executor.models import build_model
from resihp.executor.packing import Packing
from resihp.executor.sampler import GlobalBatches, Sampler
from resihp.executor.saver import save_now
from resihp.executor.session import Session
from resihp.executor.snapshots.writer import Snapshots
from resihp.executor.state import TrainState
from resihp.executor.threads import in_thread
from resihp.wire.messages import Deploy, Message, Ready, Save, Start
from resihp.wire.shared_memory import SharedDir, shared_path
from resihp.wire.timing import Timing

__all__ = ["TrainingBackend"]


class TrainingBackend:
    """See `resihp.executor.runtime.Backend`.

    ConfigError where the job's model or device cannot be had here, UserError where there is no
    shared memory for the snapshots that it wants.
    """

    def __init__(self, job: JobConfig, start: Start, send: Callable[[Message], None]) -> None:
        self._job = job
        self._rank = rank = start.rank
        self._send = send
        timing = Timing.from_detect_within(job.job.detect_within_s)
        self._model = build_model(job.model)
        self._shared, snapshots = _snapshots(job, start)
        self.state = TrainState(job, snapshots)
        self._device = device_of(job, rank, timeout_s=timing.handshake_s, host=start.host)
        self.injector = Injector(
            job.inject, rank, announcer(send), world=job.parallel.world, struck=start.struck
        )

    @property
    def position(self) -> int:
        """See `Backend`."""
        compute, comm = self._device.compute.position, self._device.comm.position
        return compute if compute >= 0 else comm

    async def open(self) -> Ready:
        """See `Backend`. Reads the data."""
        address = await self._device.open()
        self._batches, dataset = await in_thread(self._load_data)
        return Ready(
            address=address,
            dataset_digest=dataset.digest,
            num_samples=self._batches.num_samples,
            num_skipped_files=dataset.num_skipped,
        )

    def _load_data(self) -> tuple[GlobalBatches, Dataset]:
        job = self._job
        dataset = load_dataset(job.data.source)
        packing = Packing(dataset, job.batch.tokens, job.job.seed)
        sampler = Sampler(packing.num_windows, job.job.seed)
        batches = GlobalBatches(packing, sampler, job.parallel.dp, job.batch.microbatches)
        return batches, dataset

    def session(self, deploy: Deploy) -> Session:
        """See `Backend`."""
        return Session(
            self._job,
            self._rank,
            deploy,
            model=self._model,
            state=self.state,
            device=self._device,
            batches=self._batches,
            injector=self.injector,
            send=self._send,
        )

    async def save(self, order: Save) -> None:
        """See `Backend`."""
        disk = InjectedDisk(self.injector.conditions)
        model, state, device = self._model, self.state, self._device
        await save_now(self._job, model, self._rank, state, device, order, self._send, disk)


def _snapshots(job: JobConfig, start: Start) -> tuple[SharedDir | None, Snapshots | None]:
    """Our share in the directory of snapshots, for the life of this process; None: not wanted."""
    every = job.state.snapshot_every
    if every == 0 or not start.run:
        return None, None
    shared = SharedDir(shared_path(start.run, start.host))
    return shared, Snapshots(shared.path, start.rank, every)
