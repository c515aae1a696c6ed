"""Copies of snapshots on another node: whole, at the same version, refused where they changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resihp.errors import CommError, GenerationClosed
from resihp.executor.snapshots import buddies as buddies_module
from resihp.executor.snapshots.buddies import Buddies, buddy_of
from resihp.executor.snapshots.reader import open_snapshot, sealed_in
from resihp.executor.snapshots.writer import Snapshots, manifest_of
from resihp.executor.transport import Transport

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
async def pair(tmp_path: Path) -> AsyncIterator[list[tuple[Snapshots, Buddies]]]:
    """Two ranks on two nodes."""
    transports = [Transport("job", rank, timeout_s=FAR_S) for rank in HOSTS]
    addresses = {rank: await each.open() for rank, each in enumerate(transports)}
    made: list[tuple[Snapshots, Buddies]] = []
    for rank, transport in enumerate(transports):
        transport.begin(1, b"k" * 32, addresses)
        folder = tmp_path / f"node{rank}"
        folder.mkdir()
        snapshots = Snapshots(folder, rank, 1)
        made.append((snapshots, Buddies(snapshots, lambda t=transport: t, HOSTS, lambda _: SHAPES)))
    for rank, transport in enumerate(transports):
        await transport.connect(made[rank][1].peers)
    try:
        async with asyncio.timeout(FAR_S):
            yield made
    finally:
        for transport in transports:
            await transport.close()


def write(snapshots: Snapshots, version: int) -> list[dict[str, torch.Tensor]]:
    """Begin a snapshot; what it holds."""
    made = torch.Generator().manual_seed(100 * version + snapshots.rank)
    kinds = [{name: torch.randn(shape, generator=made) for name, shape in SHAPES} for _ in range(3)]
    snapshots.begin(manifest_of(snapshots.rank, 1, version, version, kinds[0]), kinds)
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
async def test_a_copy_that_came_changed_is_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its owner is not told that it is safe, and nothing of it is listed."""
    store = buddies_module._store

    def changed(slots, expected, size, parts):
        parts[0][size - 1] ^= 1
        return store(slots, expected, size, parts)

    async with pair(tmp_path) as ranks:
        monkeypatch.setattr(buddies_module, "_store", changed)
        for snapshots, _ in ranks:
            write(snapshots, 1)
        written = [snapshots.written() for snapshots, _ in ranks]
        (mine,), (theirs,) = (sealed_in(each.folder, each.rank) for each, _ in ranks)
        with pytest.raises(CommError, match="came changed"):
            await asyncio.gather(
                ranks[0][1].exchange(mine.manifest, written[0]),
                ranks[1][1].exchange(theirs.manifest, written[1]),
            )
        assert sealed_in(tmp_path / "node0", 1) == []


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
