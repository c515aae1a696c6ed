"""Rows of a run directory on a disk that fills up."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from resihp.monitor.row_file import MAX_WAITING_BYTES, RowFile, cut_rows
from resihp.monitor.run_dir import RunDir


@contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `num_bytes`: as a full disk, a part is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def steps(path: Path) -> list[int]:
    return [msgspec.json.decode(row)["step"] for row in path.read_bytes().splitlines()]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def rows(tmp_path: Path, said: list[str]) -> Iterator[RowFile]:
    made = RowFile(tmp_path / "rows", said.append)
    yield made
    made.close()


def test_a_row_is_in_the_file_whole_or_not_at_all(tmp_path: Path, rows: RowFile, said: list[str]):
    """What was begun is cut back, the reason is said once, and room brings all rows in order."""
    with disk_of(100):
        for step in range(40):
            rows.append({"step": step})
        written = (tmp_path / "rows").read_bytes()
        assert written.endswith(b"}\n")
        num = len(steps(tmp_path / "rows"))
        assert 0 < num < 40
        assert rows.num_waiting == 40 - num
        assert len(said) == 1
        assert str(tmp_path / "rows") in said[0]
    rows.append({"step": 40})
    assert steps(tmp_path / "rows") == list(range(41))
    assert rows.num_waiting == rows.num_dropped == 0


def test_rows_that_wait_are_bounded_and_counted(tmp_path: Path, rows: RowFile):
    """The oldest ones go first."""
    text = "x" * (MAX_WAITING_BYTES // 4)
    with disk_of(0):
        for step in range(6):
            rows.append({"step": step, "text": text})
    assert rows.num_dropped == 3
    rows.flush()
    assert steps(tmp_path / "rows") == [3, 4, 5]


def test_steps_are_taken_back_also_from_what_waits(tmp_path: Path, rows: RowFile):
    """From the end of it, then from the file."""
    for step in range(3):
        rows.append({"step": step})
    with disk_of(0):
        for step in range(3, 6):
            rows.append({"step": step})
        rows.take_back(4)
        assert rows.num_waiting == 1
        rows.take_back(2)
    rows.append({"step": 2})
    assert steps(tmp_path / "rows") == [0, 1, 2]


def test_a_directory_that_is_gone_stops_nobody(tmp_path: Path, said: list[str]):
    """It is as a disk that is full."""
    rows = RowFile(tmp_path / "gone" / "rows", said.append)
    rows.append({"step": 0})
    rows.append({"step": 1})
    rows.take_back(0)
    assert len(said) == 1
    rows.close()
    assert rows.num_waiting == 0


def test_a_long_file_is_cut_wherever_it_must_be(tmp_path: Path):
    """Far from its end too, and where no row is left."""
    path = tmp_path / "long"
    for version in (9000, 8000, 17, 0):
        path.write_bytes(b"".join(b'{"step":%d,"samples":[1,2]}\n' % step for step in range(9000)))
        with path.open("ab") as file:
            file.write(b'\0\0\0\n{"step":9000,"sam')
        cut_rows(path, version)
        assert steps(path) == list(range(version))


def test_a_run_goes_on_without_room_for_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Rows wait, a plan's text is not kept, and one line says so."""
    run_dir = RunDir.make(tmp_path / "run")
    with disk_of(0):
        run_dir.event("running", {"generation": 1}, 0.5)
        run_dir.plan(1, "plan", "start", "steady")
        run_dir.event("running", {"generation": 2}, 0.5)
        assert run_dir.num_missing == 2
    run_dir.flush()
    assert run_dir.num_missing == 0
    run_dir.close()
    assert capsys.readouterr().err.count("the run directory cannot be written") == 1
