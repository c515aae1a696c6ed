"""The directory of a run in shared memory: who holds it, who removes it, who may not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resihp.errors import UserError
from resihp.wire.shared_memory import SharedDir, shared_path, stale_dirs


def test_the_last_one_removes_it(tmp_path: Path):
    """Not one before."""
    path = shared_path("run", root=tmp_path)
    first, second = SharedDir(path), SharedDir(path)
    (path / "rank0.0").touch()
    first.leave()
    assert path.exists()
    second.leave()
    second.leave()
    assert not path.exists()


def test_only_we_may_look_into_it(tmp_path: Path):
    """Mode 0700, and one that others could write to is refused in words."""
    path = shared_path("run", root=tmp_path)
    SharedDir(path)
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o777)
    with pytest.raises(UserError, match="snapshot_every = 0"):
        SharedDir(path)


def test_no_shared_memory_is_the_users_to_know(tmp_path: Path):
    """With the key that does without."""
    with pytest.raises(UserError, match="No such file"):
        SharedDir(shared_path("run", root=tmp_path / "none"))


def test_nodes_of_one_machine_have_directories_of_their_own(tmp_path: Path):
    """[T34] So have runs."""
    paths = {
        shared_path(run, host, tmp_path) for run in "ab" for host in ("127.0.0.1", "127.0.0.2")
    }
    assert len(paths) == 4
    assert all(path.name.startswith(f"resihp-{os.getuid()}-") for path in paths)


def test_what_killed_processes_left_is_found_and_removed(tmp_path: Path):
    """A directory that somebody holds, and whatever is not ours, is left alone."""
    held = SharedDir(shared_path("held", root=tmp_path))
    killed = shared_path("killed", root=tmp_path)
    (tmp_path / f"resihp-{os.getuid()}-other").mkdir()
    code = (
        "import sys, os, signal, pathlib\n"
        "from resihp.wire.shared_memory import SharedDir\n"
        "SharedDir(pathlib.Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(killed)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(stale_dirs(tmp_path)) == [killed]
    assert killed.exists()
    assert list(stale_dirs(tmp_path, clean=True)) == [killed]
    assert not killed.exists()
    assert held.path.exists()
    assert list(stale_dirs(tmp_path)) == []
