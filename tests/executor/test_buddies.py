"""Copies of snapshots on another node: whole, at the same version, refused where they changed."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resihp.errors import GenerationClosed
from resihp.executor.snapshots import buddies as buddies_module
from resihp.executor.snapshots import slots as slots_module
from resihp.executor.snapshots.buddies import Buddies, buddy_of
from resihp.executor.snapshots.reader import open_snapshot, sealed_in
from resihp.executor.snapshots.writer import Snapshots, manifest_of
from resihp.executor.transport import Transport
from resihp.wire.messages import NoBuddyCopy

FAR_S = 30.0
SHAPES = [("a", (300, 500)), ("b", (7,))]
HOSTS = {0: "10.0.0.1", 1: "10.0.0.2"}


@given(st.dictionaries(st.integers(0, 9), st.sampled_from("xyz"), min_size=1))
def test_a_buddy_is_on_another_node_where_there_is_one(hosts: dict[int, str]):
    """And no rank keeps more copies than it must."""
    found = {rank: buddy_of(rank, hosts) for rank in hosts}
    if len(set(hosts.values())) == 1:
        assert set(found.values()) == {None}
        return
    for rank, buddy in found.items():
        assert buddy is not None
        assert hosts[buddy] != hosts[rank]
    for node in set(hosts.values()):
        there = [rank for rank in hosts if hosts[rank] == node]
        kept = [list(found.values()).count(rank) for rank in there]
        assert max(kept) - min(kept) <= 1


@asynccontextmanager
async def pair(
    tmp_path: Path, told: list[NoBuddyCopy] | None = None
) -> AsyncIterator[list[tuple[Snapshots, Buddies]]]:
    """Two ranks on two nodes; `told` fills with what they say of copies that are not made."""
    tell = ([] if told is None else told).append
    transports = [Transport("job", rank, timeout_s=FAR_S) for rank in HOSTS]
    addresses = {rank: await each.open() for rank, each in enumerate(transports)}
    made: list[tuple[Snapshots, Buddies]] = []
    for rank, transport in enumerate(transports):
        transport.begin(1, b"k" * 32, addresses)
        folder = tmp_path / f"node{rank}"
        folder.mkdir()
        snapshots = Snapshots(folder, rank, 1)
        buddies = Buddies(snapshots, lambda t=transport: t, HOSTS, lambda _: SHAPES, tell)
        made.append((snapshots, buddies))
    for rank, transport in enumerate(transports):
        await transport.connect(made[rank][1].peers)
    try:
        async with asyncio.timeout(FAR_S):
            yield made
    finally:
        for transport in transports:
            await transport.close()


def write(snapshots: Snapshots, version: int, generation: int = 1) -> list[dict[str, torch.Tensor]]:
    """Begin a snapshot; what it holds."""
    made = torch.Generator().manual_seed(100 * version + snapshots.rank)
    kinds = [{name: torch.randn(shape, generator=made) for name, shape in SHAPES} for _ in range(3)]
    snapshots.begin(manifest_of(snapshots.rank, generation, version, version, kinds[0]), kinds)
    return kinds


@pytest.mark.asyncio
async def test_every_snapshot_is_with_the_buddy_before_the_vote(tmp_path: Path):
    """[T14] Bitwise, in pieces, the last two versions of it; a reader sees no difference."""
    async with pair(tmp_path) as ranks:
        serving = [asyncio.create_task(buddies.serve()) for _, buddies in ranks]
        for snapshots, buddies in ranks:
            snapshots.on_begin = buddies.begun
        for version in range(1, 5):
            kinds = [write(snapshots, version) for snapshots, _ in ranks]
            waits = [asyncio.to_thread(snapshots.finish_copy) for snapshots, _ in ranks]
            await asyncio.gather(*waits)
            for rank in HOSTS:
                folder = tmp_path / f"node{1 - rank}"
                found = open_snapshot(folder, rank, generation=1, version=version)
                assert found is not None
                copy = found[1]
                assert copy is not None
                for there, here in zip(copy.kinds, kinds[rank], strict=True):
                    assert all(torch.equal(there[name], here[name]) for name in here)
        versions = [f.manifest.version for f in sealed_in(tmp_path / "node0", 1)]
        assert sorted(versions) == [3, 4]
        for task in serving:
            task.cancel()


@pytest.mark.asyncio
async def test_a_copy_that_came_changed_is_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Its owner is told that there is none, and nothing of it is listed."""
    store = buddies_module._store

    def changed(slots, expected, size, parts, keep):
        parts[0][size - 1] ^= 1
        return store(slots, expected, size, parts, keep)

    async with pair(tmp_path) as ranks:
        monkeypatch.setattr(buddies_module, "_store", changed)
        for snapshots, _ in ranks:
            write(snapshots, 1)
        written = [snapshots.written() for snapshots, _ in ranks]
        (mine,), (theirs,) = (sealed_in(each.folder, each.rank) for each, _ in ranks)
        await asyncio.gather(
            ranks[0][1].exchange(mine.manifest, written[0]),
            ranks[1][1].exchange(theirs.manifest, written[1]),
        )
        assert sealed_in(tmp_path / "node0", 1) == []
        said = capfd.readouterr().out
        assert "no copies of the snapshots of rank 1 here: the snapshot of rank 1 came" in said
        assert "no copies of snapshots: rank 0 cannot keep them" in said


def take_memory(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """There is none for files whose path ends with one of `names`."""
    reserved = slots_module._reserved

    def refused(path: Path, size: int):
        if any(str(path).endswith(name) for name in names):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return reserved(path, size)

    monkeypatch.setattr(slots_module, "_reserved", refused)


@pytest.mark.asyncio
@pytest.mark.parametrize("slot", [0, 1])
async def test_a_buddy_without_memory_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], slot: int
):
    """[T14] For one of the two slots of its ward: it is said once, the other copies go on."""
    take_memory(monkeypatch, [f"node1/rank0.{slot}"])
    told: list[NoBuddyCopy] = []
    async with pair(tmp_path, told) as ranks:
        serving = [asyncio.create_task(buddies.serve()) for _, buddies in ranks]
        for snapshots, buddies in ranks:
            snapshots.on_begin = buddies.begun
        for version in range(1, 5):
            for snapshots, _ in ranks:
                write(snapshots, version)
            waits = [asyncio.to_thread(snapshots.finish_copy) for snapshots, _ in ranks]
            await asyncio.gather(*waits)
        assert sealed_in(tmp_path / "node1", 0) == []
        assert not list((tmp_path / "node1").glob("rank0.*")), "its memory is given back"
        assert len(sealed_in(tmp_path / "node0", 1)) == 2
        assert capfd.readouterr().out.count("no copies of") == 2
        (news,) = told
        assert (news.generation, news.buddy) == (1, 1)
        assert news.why == "rank 1 cannot keep them"
        for task in serving:
            task.cancel()


@pytest.mark.asyncio
async def test_a_rank_without_snapshots_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """[T14] At the join and later: its buddy waits for no copy of it, and it keeps its ward's."""
    take_memory(monkeypatch, ["node0/rank0.0", "node0/rank0.1"])
    told: list[NoBuddyCopy] = []
    async with pair(tmp_path, told) as ranks:
        serving: list[asyncio.Task[None]] = []
        for version in range(1, 4):
            kinds = [write(snapshots, version) for snapshots, _ in ranks]
            if version == 1:
                begun = [
                    buddies.exchange(
                        manifest_of(each.rank, 1, version, version, of[0]), each.written()
                    )
                    for (each, buddies), of in zip(ranks, kinds, strict=True)
                ]
                await asyncio.gather(*begun)
                for snapshots, buddies in ranks:
                    snapshots.on_begin = buddies.begun
                    serving.append(asyncio.create_task(buddies.serve()))
            waits = [asyncio.to_thread(snapshots.finish_copy) for snapshots, _ in ranks]
            await asyncio.gather(*waits)
        assert sealed_in(tmp_path / "node1", 0) == []
        assert len(sealed_in(tmp_path / "node0", 1)) == 2
        (news,) = told
        assert (news.buddy, news.why) == (1, "there is no snapshot to copy")
        for task in serving:
            task.cancel()


@pytest.mark.asyncio
async def test_whatever_else_breaks_a_copy_is_raised_where_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A bug of ours too: the vote does not wait for a task that is gone."""

    def broken(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(buddies_module, "_store", broken)
    async with pair(tmp_path) as ranks:
        serving = [asyncio.create_task(buddies.serve()) for _, buddies in ranks]
        for snapshots, buddies in ranks:
            snapshots.on_begin = buddies.begun
            write(snapshots, 1)
        with pytest.raises(ValueError, match="broken"):
            await asyncio.to_thread(ranks[0][0].finish_copy)
        for task in serving:
            task.cancel()


@pytest.mark.asyncio
async def test_the_copy_that_all_may_go_back_to_stays_until_the_next_layout_runs(tmp_path: Path):
    """[T14] Not the newest one, where the members settled on the version before."""
    async with pair(tmp_path) as ranks:
        serving = [asyncio.create_task(buddies.serve()) for _, buddies in ranks]
        for generation, version in ((1, 1), (1, 2), (2, 1)):
            for snapshots, buddies in ranks:
                snapshots.settle(1, 1)
                snapshots.on_begin = buddies.begun
                write(snapshots, version, generation)
            waits = [asyncio.to_thread(snapshots.finish_copy) for snapshots, _ in ranks]
            await asyncio.gather(*waits)
        copies = [f.manifest for f in sealed_in(tmp_path / "node0", 1)]
        assert sorted((m.generation, m.version) for m in copies) == [(1, 1), (2, 1)]
        for task in serving:
            task.cancel()


@pytest.mark.asyncio
async def test_the_end_of_a_generation_wakes_who_waits_for_a_copy(tmp_path: Path):
    """Before the exchange began, and also what is begun after it."""
    async with pair(tmp_path) as ranks:
        snapshots, buddies = ranks[0]
        snapshots.on_begin = buddies.begun
        write(snapshots, 1)
        buddies.stop()
        with pytest.raises(GenerationClosed):
            await asyncio.to_thread(snapshots.finish_copy)
        write(snapshots, 2)
        with pytest.raises(GenerationClosed):
            await asyncio.to_thread(snapshots.finish_copy)
        snapshots.on_begin = None
        write(snapshots, 3)
        write(snapshots, 4)
        snapshots.settle(1, 4)
        snapshots.finish_copy()  # the next generation does not hear of it
