"""Parts of versions that this rank writes while training goes on, one after the other.

A version is due every so many steps, at the last step, and where all agreed on it in the vote. The
copy is work of the communication stream, which the next vote and so the next update come after:
it overlaps with F and B of the next iteration and never sees half an update. A thread writes it.

Nothing here imports torch's checkpoint package before the first part is due.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from resihp.checkpoint.disk import Disk
from resihp.checkpoint.versions import version_name
from resihp.config import JobConfig
from resihp.errors import GenerationClosed, ResihpError
from resihp.executor.before import Before
from resihp.executor.boundary import Ask
from resihp.executor.device.interface import Device
from resihp.executor.model import Model
from resihp.executor.pause import MAX_PAUSE_S, pause
from resihp.executor.state import Holding, TrainState
from resihp.executor.threads import in_thread
from resihp.ir.model import Plan
from resihp.ir.parser import parse
from resihp.wire.messages import Message, PartSaved, Save, SaveAt, SaveFailed, StepRecord

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from resihp.checkpoint.manifest import PartFile
    from resihp.executor.checkpoint.saving import Share

    _Boxes = Mapping[MetadataIndex, Tensor]
    _Copied = tuple[_Boxes, float]
    """With the seconds that it took."""

__all__ = ["Saver", "save_now"]


class _Job(NamedTuple):
    """One part to write."""

    name: str
    version: int
    updates: int
    loss: float | None
    began_s: float


class Saver:
    """Of one generation on one rank; `close` gives up whatever is being written."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        rank: int,
        state: TrainState,
        device: Device,
        at: SaveAt,
        generation: int,
        send: Callable[[Message], None],
        *,
        every: int,
        num_steps: int,
        disk: Disk | None = None,
    ) -> None:
        """`every` so many steps and at step `num_steps` a version is due; 0: when asked only."""
        self._model = model
        self._plan = plan
        self._rank = rank
        self._state = state
        self._device = device
        self._at = at
        self._generation = generation
        self._send = send
        self._every = every
        self._num_steps = num_steps
        self._disk = disk
        self._closed = threading.Event()
        self._writing: asyncio.Task[None] | None = None
        self._finding: asyncio.Task[Share] | None = None

    def prepare(self) -> None:
        """Begin to find out what to write, where a part is due by its number.

        It takes a second for a large plan, and nobody needs it before the first part is due.
        """
        if self._every:
            self._find()

    def _find(self) -> asyncio.Task[Share]:
        if self._finding is None:
            self._finding = asyncio.create_task(in_thread(self._find_share))
        return self._finding

    async def cross(self, version: int, agreed: Ask) -> None:
        """A `Duty` at the end of an iteration: begin a part where one is due."""
        is_due = self._every and (version % self._every == 0 or version == self._num_steps)
        if not is_due and Ask.CHECKPOINT not in agreed:
            return
        name = version_name(version, self._at.run, self._generation)
        if self._writing is not None and not self._writing.done():
            why = "the version before it is still being written"
            failed = SaveFailed(generation=self._generation, name=name, why=why, is_busy=True)
            self._send(failed)
            return
        await self._ended()
        share = await self._find()
        holding = self._state.current
        assert holding is not None
        job = _Job(name, version, self._state.updates, _loss(self._state.record), time.monotonic())
        copied = self._device.comm.submit(
            partial(_timed_copy, share, self._model, holding),
            waits=(self._device.compute.submit(_nothing),),  # the update before
        )
        self._writing = asyncio.create_task(self._write(job, share, copied.wait_async()))

    async def finish(self) -> None:
        """Wait for the last part: the job ends after it."""
        if self._writing is not None:
            with pause("writes a version to disk", at_most_s=MAX_PAUSE_S):
                await asyncio.wait([self._writing])
            await self._ended()

    def close(self) -> None:
        """The generation is over: its unfinished version is of no use."""
        self._closed.set()
        for task in (self._finding, self._writing):
            if task is not None:
                task.cancel()

    async def _ended(self) -> None:
        """Raise what the writing that ended raised: a bug."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    def _find_share(self) -> Share:
        from resihp.executor.checkpoint.saving import Division

        return Division(self._model, self._plan).share(self._rank)

    async def _write(self, job: _Job, share: Share, copied: Awaitable[_Copied]) -> None:
        try:
            copies, stalled_s = await copied
            written = await in_thread(partial(self._write_part, job, share, copies))
        except ResihpError:
            return  # the generation ends, or something of it broke: who waits for it is told
        except OSError as error:
            self._send(SaveFailed(generation=self._generation, name=job.name, why=_spelled(error)))
            return
        self._send(_part_saved(self._generation, job, written, stalled_s))

    def _write_part(self, job: _Job, share: Share, copies: _Boxes) -> PartFile:
        def go_on() -> None:
            if self._closed.is_set():
                raise GenerationClosed("the generation is over")

        where = self._at, self._rank, self._disk
        return _written(self._model, where, job, share, copies, go_on)


async def save_now(
    job: JobConfig,
    model: Model,
    rank: int,
    state: TrainState,
    device: Device,
    order: Save,
    send: Callable[[Message], None],
    disk: Disk | None = None,
) -> None:
    """Write this rank's part of the settled state, while no generation runs."""
    began_s = time.monotonic()
    before = Before(model, job, order.plan, rank, device.torch_device)
    adopted = device.comm.submit(lambda: state.adopt(order.base, order.commit, before.room))
    await adopted.wait_async()
    version = order.commit.version
    name = version_name(version, order.at.run, order.generation)
    holding = state.current
    assert holding is not None, "asked to save what is not here"
    part = _Job(name, version, order.commit.updates, _loss(state.record), began_s)

    def write() -> PartFile:
        from resihp.executor.checkpoint.saving import Division

        share = Division(model, parse(order.plan).plan, order.alive).share(rank)
        copies = share.copy(model, holding)
        return _written(model, (order.at, rank, disk), part, share, copies, _nothing)

    try:
        written = await in_thread(write)
    except OSError as error:
        send(SaveFailed(generation=order.generation, name=name, why=_spelled(error)))
        return
    send(_part_saved(order.generation, part, written, 0.0))


def _written(
    model: Model,
    where: tuple[SaveAt, int, Disk | None],
    job: _Job,
    share: Share,
    copies: _Boxes,
    go_on: Callable[[], None],
) -> PartFile:
    from resihp.executor.checkpoint.pieces import all_keys
    from resihp.executor.checkpoint.saving import write_part

    at, rank, disk = where
    return write_part(
        Path(at.directory),
        job.name,
        rank,
        job.version,
        share,
        copies,
        all_keys(model),
        go_on=go_on,
        disk=disk,
    )


def _timed_copy(share: Share, model: Model, holding: Holding) -> _Copied:
    began_s = time.monotonic()
    copies = share.copy(model, holding)
    return copies, time.monotonic() - began_s


def _part_saved(generation: int, job: _Job, file: PartFile, stalled_s: float) -> PartSaved:
    return PartSaved(
        generation=generation,
        name=job.name,
        version=job.version,
        updates=job.updates,
        loss=job.loss,
        part_bytes=file.part_bytes,
        part_sha256=file.part_sha256,
        data_bytes=file.data_bytes,
        stalled_s=stalled_s,
        took_s=time.monotonic() - job.began_s,
    )


def _loss(record: StepRecord | None) -> float | None:
    return record.loss if record is not None and math.isfinite(record.loss) else None


def _spelled(error: OSError) -> str:
    return f"{error.filename or 'disk'}: {error.strerror or error}"


def _nothing() -> None:
    """Comes after all that was queued before it."""
