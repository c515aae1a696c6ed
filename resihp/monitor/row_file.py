"""A file of rows that a full disk does not spoil: each row is in it whole, in order, or not yet.

What the disk refuses waits here, and is written before any later row once there is room again.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

__all__ = ["MAX_WAITING_BYTES", "RowFile", "cut_rows", "tail"]

_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_TAIL_BYTES = 64 << 10

MAX_WAITING_BYTES = 4 << 20
"""Of rows that wait for a disk; beyond it the oldest ones are dropped, and counted."""


class RowFile:
    """One JSON object per line, appended. Never raises OSError."""

    def __init__(self, path: Path, on_trouble: Callable[[str], None]) -> None:
        """`on_trouble` hears, each time rows begin to wait, why."""
        self._path = path
        self._on_trouble = on_trouble
        self._fd: int | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_refused = False
        self.num_dropped = 0
        """Rows that were given up."""

    @property
    def num_waiting(self) -> int:
        """Rows that are not in the file yet."""
        return len(self._waiting)

    def append(self, row: dict[str, object]) -> None:
        """Write a row, now or when there is room."""
        line = msgspec.json.encode(row) + b"\n"
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        self.flush()
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._forget()
            self.num_dropped += 1

    def flush(self) -> None:
        """Write what waits, as far as the disk takes it."""
        try:
            while self._waiting:
                if self._fd is None:
                    self._fd = os.open(self._path, _APPEND, 0o644)
                _write(self._fd, self._waiting[0])
                self._forget()
            self._is_refused = False
        except OSError as error:
            self._refused(error)

    def take_back(self, version: int) -> None:
        """Forget the last rows, those of steps from `version` on."""
        while self._waiting and _step(self._waiting[-1]) >= version:
            self._waiting_bytes -= len(self._waiting.pop())
        if not self._waiting:
            try:
                cut_rows(self._path, version)
            except OSError as error:
                self._refused(error)

    def close(self) -> None:
        """Close the file; what still waits is given up."""
        self.flush()
        self.num_dropped += len(self._waiting)
        self._waiting.clear()
        if self._fd is not None:
            os.close(self._fd)

    def _refused(self, error: OSError) -> None:
        if not self._is_refused:
            self._on_trouble(f"{self._path}: {error.strerror}")
        self._is_refused = True

    def _forget(self) -> None:
        self._waiting_bytes -= len(self._waiting.popleft())


def _write(fd: int, line: bytes) -> None:
    """Append `line`, or nothing of it."""
    size = os.fstat(fd).st_size
    num_written = os.write(fd, line)
    if num_written == len(line):
        return
    try:
        # A disk that fills up takes a part first, and says why only when asked again.
        if os.write(fd, line[num_written:]) != len(line) - num_written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.ftruncate(fd, size)
        raise


class _Row(msgspec.Struct):
    step: int


def _step(row: bytes) -> int:
    return msgspec.json.decode(row, type=_Row).step


def tail(path: Path, num_rows: int) -> tuple[int, list[bytes]]:
    """At least the last `num_rows` whole rows (all, if there are fewer), and where they begin.

    The rest of a row without its end is not among them.
    """
    length = _TAIL_BYTES
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while True:
            start = file.seek(max(0, size - length))
            content = file.read(size - start)
            if start == 0 or content.count(b"\n") > num_rows:
                break
            length *= 4
    if start:
        first = content.index(b"\n") + 1
        start, content = start + first, content[first:]
    return start, [row + b"\n" for row in content.split(b"\n")[:-1]]


def cut_rows(path: Path, version: int) -> None:
    """Cut off the end of a file: rows of steps from `version` on, and what is no row of a step."""
    num_rows = 64
    start, rows = tail(path, num_rows)
    while not (kept := _num_kept(rows, version)) and start:
        num_rows *= 8
        start, rows = tail(path, num_rows)
    os.truncate(path, start + sum(map(len, rows[:kept])))


def _num_kept(rows: list[bytes], version: int) -> int:
    for kept in range(len(rows), 0, -1):
        try:
            if _step(rows[kept - 1]) < version:
                return kept
        except msgspec.DecodeError:
            pass  # a machine died while it was written
    return 0
