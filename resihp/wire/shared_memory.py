"""The directory in shared memory that the processes of a run on one node keep snapshots in.

`/dev/shm/resihp-<uid>-<run>` (mode 0700) and one more word for each further node of a machine.
Every process that needs it holds a shared flock on the file `lock` in it, so a directory whose
lock can be had exclusively belongs to nobody: the last one to leave removes it, and
`resihp doctor --clean` those of runs that were killed. Plain files: a tracker of shared memory
would remove them under those who still read.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from resihp.errors import UserError
from resihp.wire.address import LOOPBACK

__all__ = [
    "SHM",
    "KeptDir",
    "SharedDir",
    "remove_once_unheld",
    "remove_unheld",
    "shared_path",
    "stale_dirs",
]

SHM = Path("/dev/shm")
"""Where Linux keeps files in memory."""
_POLL_S = 0.01
_LOCK = "lock"


def shared_path(run: str, host: str = LOOPBACK, root: Path = SHM) -> Path:
    """Where the ranks of the node at `host` of the run `run` (its directory's name) keep
    snapshots: several nodes may be on one machine."""
    further = "" if host == LOOPBACK else f"-{host}"
    return root / f"resihp-{os.getuid()}-{run}{further}"


class SharedDir:
    """Our share in such a directory, from making it until `leave`."""

    def __init__(self, path: Path) -> None:
        """Make it where it is not there yet. UserError where there is no room for it at all."""
        self.path = path
        try:
            self._lock: int | None = _locked(path)
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}; snapshots of the state need shared memory there, or "
                "`snapshot_every = 0` in [state]",
                key="state.snapshot_every",
            ) from error

    def leave(self) -> None:
        """Give up our share; the last one removes the directory."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _leave(lock, self.path)


def _locked(path: Path) -> int:
    """A shared lock on the directory `path`, which is there then and ours."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(path):
            raise PermissionError(1, "not a directory of ours alone")
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if _is_linked(lock, path):
            return lock
        os.close(lock)  # the last one removed it meanwhile


def _leave(lock: int, path: Path) -> None:
    try:
        # Of those who leave together exactly one gets it: the kernel takes our share away first.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _is_ours(path: Path) -> bool:
    found = path.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    return is_private and found.st_uid == os.getuid()


def _is_linked(lock: int, path: Path) -> bool:
    """Whether the file that we locked is still the one that others would lock."""
    try:
        there = os.stat(path / _LOCK, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(lock), there)


class KeptDir:
    """Keeps a directory that another process of ours makes, while that one is away."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._share: SharedDir | None = None

    def keep(self) -> None:
        """Take a share in it, where it is there."""
        if self._share is None and self._path.exists():
            self._share = SharedDir(self._path)

    def leave(self) -> None:
        """Give the share up; the last one of all removes it."""
        if self._share is not None:
            self._share.leave()
        else:
            remove_unheld(self._path)


def remove_unheld(path: Path) -> bool:
    """Remove a directory that nobody holds, as the last one would have; whether it was one."""
    return _unheld(path, clean=True)


def remove_once_unheld(path: Path, within_s: float) -> None:
    """Remove a directory whose holders were just killed: they are gone within moments.

    Blocks for at most `within_s`; what somebody holds even then is left.
    """
    until_s = time.monotonic() + within_s
    while path.exists() and not remove_unheld(path) and time.monotonic() < until_s:
        time.sleep(_POLL_S)


def stale_dirs(root: Path = SHM, *, clean: bool = False) -> Iterator[Path]:
    """Directories of runs of this user that no process holds; `clean` removes them."""
    for path in sorted(root.glob(f"resihp-{os.getuid()}-*")):
        if _unheld(path, clean=clean):
            yield path


def _unheld(path: Path, *, clean: bool) -> bool:
    try:
        if not _is_ours(path):
            return False
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # not made by us, or gone
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        if clean:
            shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(lock)
