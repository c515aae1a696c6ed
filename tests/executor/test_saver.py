"""Parts are written beside training: what is due when, and that they are of one version."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cases import assert_same_bits
from layouts import MODEL, job_of, logical_tensors, one_stage, shards_of

from resihp.checkpoint.disk import Disk
from resihp.checkpoint.manifest import Manifest, PartFile, Position
from resihp.checkpoint.versions import complete, version_name
from resihp.executor.boundary import Ask
from resihp.executor.checkpoint.loading import load_holding
from resihp.executor.device.interface import Device
from resihp.executor.saver import Saver, save_now
from resihp.executor.state import TrainState, initial_holding
from resihp.executor.stream import ThreadStream
from resihp.ir.expand import expand
from resihp.ir.printer import print_plan
from resihp.wire.messages import Commit, Message, PartSaved, Save, SaveAt, SaveFailed, StepRecord

PLAN = one_stage({0: 1}, 1, 2)
PROGRAM = expand(PLAN, 0)
JOB = job_of(PLAN.mesh)
NUM_STEPS = 7


class SlowDisk(Disk):
    """Writes when it is allowed to."""

    def __init__(self) -> None:
        self.may_write = threading.Event()

    def write(self, file: int, block: memoryview) -> int:
        self.may_write.wait()
        return super().write(file, block)


class Rank:
    """A state that takes steps, with a saver beside it."""

    def __init__(self, directory: Path, every: int, disk: Disk | None) -> None:
        self.directory = directory
        self.sent: list[Message] = []
        self.state = TrainState(JOB)
        self.state.adopt(0, Commit(version=0, updates=0, record=None))
        self.state.prepare(1, initial_holding(MODEL, JOB, PROGRAM))
        self.state.go()
        streams = SimpleNamespace(
            compute=ThreadStream("compute"),
            comm=ThreadStream("comm"),
            torch_device=torch.device("cpu"),
        )
        self.device = cast("Device", streams)
        self.at = SaveAt(directory=str(directory), run="run")
        self.saver = Saver(
            MODEL,
            PLAN,
            0,
            self.state,
            self.device,
            self.at,
            1,
            self.sent.append,
            every=every,
            num_steps=NUM_STEPS,
            disk=disk,
        )

    async def step(self, asked: Ask = Ask.NOTHING) -> None:
        """An iteration, whose update comes after whatever the communication stream does first."""
        version = self.state.version
        await self.device.comm.submit(self.vote).wait_async()
        await self.device.compute.submit(self.state.apply).wait_async()
        assert self.state.version == version + 1
        await self.saver.cross(self.state.version, asked)

    def vote(self) -> None:
        version = self.state.version
        self.state.reduce_complete(shards_of(PROGRAM, logical_tensors(version)))
        self.state.vote_complete(
            StepRecord(
                step=version,
                loss=2.5,
                grad_norm=1.0,
                learning_rate=1e-2,
                skipped=False,
                num_tokens=1,
                samples=(version,),
                duration_s=0.1,
            )
        )

    def copies(self) -> dict[str, Any]:
        assert self.state.current is not None
        return {name: tensor.clone() for name, tensor in self.state.current.parameters.items()}

    def saved(self) -> list[PartSaved]:
        return [each for each in self.sent if isinstance(each, PartSaved)]

    def load(self, part: PartSaved) -> dict[str, Any]:
        file = PartFile(
            rank=0,
            part_bytes=part.part_bytes,
            part_sha256=part.part_sha256,
            data_bytes=part.data_bytes,
        )
        manifest = Manifest(
            step=part.version,
            updates=part.updates,
            loss=part.loss,
            position=Position(dataset="d", seed=0, tokens=64, num_microbatches=2),
            run="run",
            generation=part.generation,
            parts=(file,),
        )
        complete(self.directory, part.name, manifest)
        version = self.directory / part.name
        return load_holding(MODEL, JOB.optimizer, PROGRAM, version).holding.parameters


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """Makes ranks; what they still write is let go at the end."""
    disks: list[SlowDisk] = []

    def made(every: int = 0, disk: Disk | None = None) -> Rank:
        if isinstance(disk, SlowDisk):
            disks.append(disk)
        return Rank(tmp_path, every, disk)

    yield made
    for disk in disks:
        disk.may_write.set()


async def written(rank: Rank, number: int) -> None:
    """Until so many parts are told of."""
    async with asyncio.timeout(30):
        while len(rank.saved()) < number:
            await asyncio.sleep(0.001)


@pytest.mark.asyncio
async def test_versions_are_due_by_their_number_and_at_the_end(make: Any) -> None:
    """Every third step, and the last one; the job ends after its part is written."""
    rank = make(every=3)
    rank.saver.prepare()
    for step in range(1, NUM_STEPS + 1):
        await rank.step()
        await written(rank, len([each for each in (3, 6) if each <= step]))
    await rank.saver.finish()
    assert [part.version for part in rank.saved()] == [3, 6, 7]
    assert {part.loss for part in rank.saved()} == {2.5}


@pytest.mark.asyncio
async def test_a_version_is_due_where_all_agreed_on_it(make: Any) -> None:
    """Whatever `every` says; another wish is none of it."""
    rank = make()
    await rank.step()
    await rank.step(Ask.CHECKPOINT | Ask.AUDIT)
    await rank.step(Ask.AUDIT)
    await rank.saver.finish()
    assert [part.version for part in rank.saved()] == [2]


@pytest.mark.asyncio
async def test_training_goes_on_while_a_version_is_written(make: Any) -> None:
    """The disk is slow, steps are not; what is written is the version, not what came after."""
    disk = SlowDisk()
    rank = make(every=2, disk=disk)
    await rank.step()
    await rank.step()
    version = rank.copies()
    await rank.step()
    await rank.step()
    (failed,) = rank.sent
    assert isinstance(failed, SaveFailed)
    assert "still being written" in failed.why
    assert failed.is_busy
    disk.may_write.set()
    await rank.saver.finish()
    (part,) = rank.saved()
    assert part.version == 2
    assert_same_bits(rank.load(part), version)


@pytest.mark.asyncio
async def test_a_closed_generation_tells_nothing_of_its_version(make: Any, tmp_path: Path) -> None:
    """[T23] The thread gives up before its next chunk and leaves no file behind."""
    disk = SlowDisk()
    rank = make(every=2, disk=disk)
    await rank.step()
    await rank.step()
    folder = tmp_path / version_name(2, "run", 1)
    async with asyncio.timeout(30):
        while not list(folder.glob("*.data")):
            await asyncio.sleep(0.001)
        rank.saver.close()
        disk.may_write.set()
        while list(folder.iterdir()):
            await asyncio.sleep(0.001)
    assert rank.sent == []


@pytest.mark.asyncio
async def test_a_full_disk_is_told(make: Any) -> None:
    """[T22] As a failed save, with the system's word for it; the next one is tried again."""
    disk = FullOnce()
    rank = make(every=1, disk=disk)
    await rank.step()
    await rank.saver.finish()
    (failed,) = rank.sent
    assert isinstance(failed, SaveFailed)
    assert "No space left" in failed.why
    assert not failed.is_busy
    await rank.step()
    await rank.saver.finish()
    assert [part.version for part in rank.saved()] == [2]


class FullOnce(Disk):
    """Full for the first file."""

    def __init__(self) -> None:
        self.is_full = True

    def create(self, name: str, folder: int) -> int:
        if self.is_full:
            self.is_full = False
            raise OSError(28, "No space left on device")
        return super().create(name, folder)


@pytest.mark.asyncio
async def test_what_is_settled_is_saved_where_nobody_runs(make: Any) -> None:
    """A rank that is behind rolls forward first."""
    rank = make()
    await rank.step()
    await rank.device.comm.submit(rank.vote).wait_async()
    commit = Commit(version=2, updates=2, record=rank.state.record)
    order = Save(generation=2, base=1, commit=commit, plan=print_plan(PLAN), alive=(0,), at=rank.at)
    await save_now(JOB, MODEL, 0, rank.state, rank.device, order, rank.sent.append)
    (part,) = rank.saved()
    assert (part.version, part.updates, part.generation) == (2, 2, 2)
    assert_same_bits(rank.load(part), rank.copies())
