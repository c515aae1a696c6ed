"""Versions that are damaged or crafted: refused by name, before memory is taken, and never run."""

from __future__ import annotations

import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from odd_model import ODD
from saved_layouts import CONFIG, logical_state, random_layout, save

from resihp.checkpoint.disk import open_folder
from resihp.checkpoint.manifest import COMPLETE, MANIFEST, sha256
from resihp.checkpoint.versions import check_data, newest_complete, read_manifest, read_parts
from resihp.errors import CheckpointRefused
from resihp.executor.checkpoint.loading import load_holding
from resihp.ir.expand import expand

PLAN = random_layout(random.Random(0))
OTHER = random_layout(random.Random(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions, never changed; the path of the newer one."""
    directory = tmp_path_factory.mktemp("saved")
    save(directory, PLAN, logical_state(1), step=10, run="before")
    return save(directory, PLAN, logical_state(2), step=20, run="now")


@pytest.fixture
def version(saved: Path, tmp_path: Path) -> Path:
    """Step 20, with step 10 before it."""
    shutil.copytree(saved.parent, tmp_path / "versions")
    return tmp_path / "versions" / saved.name


def check_all(version: Path) -> None:
    with open_folder(version) as folder:
        for rank, part in read_parts(folder, read_manifest(folder)).items():
            check_data(folder, rank, part)


def load_all(version: Path) -> None:
    for rank in OTHER.active_ranks:
        load_holding(ODD, CONFIG, expand(OTHER, rank), version)


def datas(version: Path) -> list[Path]:
    return sorted(path for path in version.glob("part-*.data") if path.stat().st_size)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def swap(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


# --- damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda at: flip(datas(at)[0], 3),
        lambda at: flip(datas(at)[-1], -1),
        lambda at: datas(at)[0].write_bytes(bytes(datas(at)[0].stat().st_size)),
    ],
    ids=["a bit at the front", "the last bit", "all zero"],
)
def test_damaged_bytes_are_refused_by_name(version: Path, damage: Callable[[Path], None]):
    """[T21] Whoever reads them, and the check of all bytes, name file and tensor."""
    damage(version)
    with pytest.raises(CheckpointRefused, match=r"part-\d+\.data: \w+\.[\w.]+ at"):
        load_all(version)
    with pytest.raises(CheckpointRefused, match="part-"):
        check_all(version)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda at: os.truncate(datas(at)[0], datas(at)[0].stat().st_size - 1), "bytes, not"),
        (lambda at: os.truncate(datas(at)[0], 0), "0 bytes, not"),
        (lambda at: datas(at)[0].unlink(), "No such file"),
        (lambda at: flip(next(at.glob("part-*.json")), 40), "hash is not that of the manifest"),
        (lambda at: flip(at / MANIFEST, 9), "hash is not that of the marker"),
        (lambda at: (at / COMPLETE).write_bytes(b"{"), "truncated"),
        (lambda at: (at / COMPLETE).write_bytes(b""), "truncated"),
        (lambda at: swap(*sorted(at.glob("part-*.json"))[:2]), "hash is not that of the manifest"),
    ],
    ids=["cut", "empty", "gone", "part", "manifest", "marker", "empty marker", "swapped"],
)
def test_what_does_not_fit_is_refused_and_the_version_before_is_taken(
    version: Path, damage: Callable[[Path], Any], what: str
):
    """[T21] Before a byte of data is read; the reason has the file's name."""
    damage(version)
    found, troubles = newest_complete(version.parent)
    assert found is not None
    assert found.version.step == 10
    assert len(troubles) == 1
    assert what in troubles[0]
    assert str(version) in troubles[0]
    load_all(version.parent / found.name)


def test_the_shard_of_another_step_is_refused(version: Path):
    """[T21] Files of step 10 in the version of step 20: their hashes are not the manifest's."""
    before = next(path for path in version.parent.iterdir() if "00010" in path.name)
    mine, theirs = datas(version)[0], datas(before)[0]
    mine.write_bytes(theirs.read_bytes())
    with pytest.raises(CheckpointRefused, match="its hash is not that of the part"):
        load_all(version)
    name = mine.with_suffix(".json").name
    (version / name).write_bytes((before / name).read_bytes())
    found, _ = newest_complete(version.parent)
    assert found is not None
    assert found.version.step == 10


# --- craft


def forge(
    version: Path,
    change: Callable[[dict[str, Any]], None] = lambda _: None,
    of_manifest: Callable[[dict[str, Any]], None] = lambda _: None,
) -> None:
    """Change the first part and the manifest, and make all hashes above them right again."""
    manifest = msgspec.json.decode((version / MANIFEST).read_bytes())
    file = manifest["parts"][0]
    path = version / f"part-{file['rank']:05}.json"
    part = msgspec.json.decode(path.read_bytes())
    change(part)
    raw = msgspec.json.encode(part)
    path.write_bytes(raw)
    file["part_bytes"], file["part_sha256"] = len(raw), sha256(raw)
    of_manifest(manifest)
    raw = msgspec.json.encode(manifest)
    (version / MANIFEST).write_bytes(raw)
    marker = {"format": 1, "manifest_bytes": len(raw), "manifest_sha256": sha256(raw)}
    (version / COMPLETE).write_bytes(msgspec.json.encode(marker))


def assert_refused(version: Path) -> str:
    """With next to no memory; why."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointRefused) as refusal:
            load_holding(ODD, CONFIG, expand(OTHER, min(OTHER.active_ranks)), version)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_forgery_that_changes_nothing_loads(version: Path):
    """The tool of the tests below makes valid versions."""
    forge(version)
    load_all(version)


def set_chunk(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda part: part["chunks"][0].update(fields)


def first_tensor(part: dict[str, Any]) -> dict[str, Any]:
    return part["tensors"][part["chunks"][0]["tensor"]]


HUGE = 1 << 59


def huge_chunk(part: dict[str, Any]) -> None:
    first_tensor(part).update(shape=[HUGE, HUGE])
    part["chunks"][0].update(offsets=[0, 0], sizes=[HUGE, HUGE])


PARTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "huge shape": lambda part: first_tensor(part).update(shape=[HUGE, HUGE]),
    "huge chunk": huge_chunk,
    "negative size": lambda part: part["chunks"][0].update(sizes=[-1, -1]),
    "negative offset": lambda part: part["chunks"][0].update(offsets=[-4, 0]),
    "beyond the tensor": lambda part: part["chunks"][0].update(offsets=[1 << 40, 0]),
    "no such tensor": set_chunk(tensor="../../etc/passwd"),
    "empty chunk": lambda part: part["chunks"][0].update(sizes=[0, 1]),
    "too many dims": lambda part: first_tensor(part).update(shape=[1] * 9),
    "fractions": lambda part: first_tensor(part).update(shape=[1.5, 2]),
    "other dtype": lambda part: first_tensor(part).update(dtype="object"),
    "unknown field": lambda part: part.update(__reduce__="os.system"),
    "a chunk twice": lambda part: part["chunks"].append(part["chunks"][0]),
    "a chunk less": lambda part: part["chunks"].pop(),
    "another step": lambda part: part.update(step=10),
    "another number": lambda part: part.update(num_tensors=1),
    "bad digest": set_chunk(sha256="zz"),
    "name too long": lambda part: part["tensors"].update({"x" * 2000: {"shape": [1]}}),
}


@pytest.mark.parametrize("change", PARTS.values(), ids=PARTS.keys())
def test_a_crafted_part_is_refused(version: Path, change: Callable[[dict[str, Any]], None]):
    """[S6] With right hashes all the way up; in one line, with the version's path."""
    forge(version, change)
    assert str(version) in assert_refused(version)


MANIFESTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "path as rank": lambda it: it["parts"][0].update(rank="../../../etc/passwd"),
    "negative rank": lambda it: it["parts"][0].update(rank=-1),
    "huge rank": lambda it: it["parts"][0].update(rank=1 << 70),
    "a part twice": lambda it: it["parts"].append(it["parts"][0]),
    "no parts": lambda it: it.update(parts=[]),
    "another step": lambda it: it.update(step=10),
    "another format": lambda it: it.update(format=2),
    "more bytes": lambda it: it["parts"][0].update(data_bytes=1 << 50),
    "unknown field": lambda it: it.update(load="os.system"),
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_crafted_manifest_is_refused(version: Path, change: Callable[[dict[str, Any]], None]):
    """[S6] No name in it is a path, and no size is believed."""
    forge(version, of_manifest=change)
    assert str(version) in assert_refused(version)


def by_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere.name)


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def sparse(path: Path) -> None:
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("change", [by_link, as_fifo, sparse])
@pytest.mark.parametrize("name", [COMPLETE, MANIFEST, "part-*.json", "part-*.data"])
def test_links_pipes_and_endless_files_are_refused(
    version: Path, change: Callable[[Path], None], name: str
):
    """[S6] In place of any file of a version; nothing waits for the pipe."""
    change(next(path for path in sorted(version.glob(name)) if path.stat().st_size))
    assert str(version) in assert_refused(version)
    found, _ = newest_complete(version.parent)
    assert found is not None
    assert found.version.step == 10


def test_a_version_that_is_a_link_is_refused(version: Path):
    """[S6] A directory of versions leads nowhere else."""
    elsewhere = version.parent / "elsewhere"
    version.rename(elsewhere)
    version.symlink_to(elsewhere)
    found, troubles = newest_complete(version.parent)
    assert found is not None
    assert found.version.step == 10
    assert str(version) in troubles[0]


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"\xff\xfe", b"NaN", b"{}", b"null", b"\x80\x04."])
def test_documents_that_are_none_are_refused(version: Path, raw: bytes):
    """[S6] Deep, broken or of another kind, in place of the marker or of the manifest."""
    (version / MANIFEST).write_bytes(raw)
    marker = {"format": 1, "manifest_bytes": len(raw), "manifest_sha256": sha256(raw)}
    (version / COMPLETE).write_bytes(msgspec.json.encode(marker))
    assert str(version) in assert_refused(version)
    (version / COMPLETE).write_bytes(raw)
    assert str(version) in assert_refused(version)
