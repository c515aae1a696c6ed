"""The file with a job's secret: private, of this user, bounded; and told in words if it is not."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from coordinator_cases import job_of

from resihp.config import JobConfig, NetworkConfig
from resihp.errors import AuthError, ConfigError
from resihp.monitor.private_file import job_secret, read_private


def secret_job(path: Path, name: str = "sim") -> JobConfig:
    job = job_of()
    return msgspec.structs.replace(
        job,
        job=msgspec.structs.replace(job.job, name=name),
        network=NetworkConfig(nodes=("127.0.0.1",), port=29400, secret_file=str(path)),
    )


def private(path: Path, content: bytes = b"k" * 44 + b"\n", mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_each_job_has_its_own_secret_of_one_file(tmp_path: Path):
    """The same on every node, and a line end more or less does not matter."""
    path = private(tmp_path / "key")
    secret = job_secret(secret_job(path))
    assert len(secret) == 32
    assert secret == job_secret(secret_job(private(tmp_path / "copy", b"k" * 44, 0o400)))
    assert secret != job_secret(secret_job(path, "other"))
    assert b"kkkk" not in secret


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604, 0o700, 0o4600])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int):
    """[S1] With the mode that would do."""
    path = private(tmp_path / "key", mode=mode)
    with pytest.raises(ConfigError, match="not a private file of this user; nearest valid: chmod"):
        job_secret(secret_job(path))


def test_a_file_of_somebody_else_is_refused(tmp_path: Path):
    """Whoever owns it can change it."""
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path = private(tmp_path / "key")
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="not a private file of this user"):
        job_secret(secret_job(path))


@pytest.mark.parametrize("content", [b"", b"short", b"\n" * 100])
def test_a_secret_that_is_too_short_is_refused(tmp_path: Path, content: bytes):
    """An empty file must not open the job to everybody."""
    with pytest.raises(ConfigError, match="at least 32 are needed; make one with"):
        job_secret(secret_job(private(tmp_path / "key", content)))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    """With the command that makes one, and without what a traceback would show."""
    with pytest.raises(ConfigError, match="no such file; make one with") as caught:
        job_secret(secret_job(tmp_path / "key"))
    assert caught.value.key == "network.secret_file"


def test_links_pipes_folders_and_long_files_are_refused(tmp_path: Path):
    """Without reading them, and without waiting for whoever holds the other end."""
    link, pipe, long = tmp_path / "link", tmp_path / "pipe", private(tmp_path / "long", b"k" * 101)
    link.symlink_to(private(tmp_path / "key"))
    os.mkfifo(pipe, 0o600)
    for path in (link, pipe, tmp_path, long):
        with pytest.raises(AuthError):
            read_private(path, limit_bytes=100)
