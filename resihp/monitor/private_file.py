"""Files that hold a secret: read only where they are ours and nobody else can read them."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from resihp.config import JobConfig
from resihp.errors import AuthError, ConfigError
from resihp.wire.auth import SECRET_BYTES, derive_key

__all__ = ["job_secret", "read_private"]

MAX_SECRET_FILE_BYTES = 4096
HOW_TO_MAKE_ONE = "(umask 077; head -c 32 /dev/urandom | base64 > FILE)"


def read_private(
    path: Path, *, limit_bytes: int, modes: Collection[int] = (0o600,)
) -> bytes | None:
    """The content of a private plain file of this user, None where there is none.

    AuthError where it is of somebody else, may be read or written by others, is a link or no
    plain file, or is longer than `limit_bytes`.
    """
    try:
        # Without O_NONBLOCK a named pipe in this place would hold us until somebody writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AuthError(f"{path} is not a plain file: {error.strerror}") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise AuthError(f"{path} is not a plain file")
        if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) not in modes:
            raise AuthError(f"{path} is not a private file of this user")
        content = os.read(fd, limit_bytes + 1)
    finally:
        os.close(fd)
    if len(content) > limit_bytes:
        raise AuthError(f"{path} is longer than {limit_bytes} bytes")
    return content


def job_secret(job: JobConfig) -> bytes:
    """The secret of a job on several nodes, from `[network] secret_file`.

    Each job has its own, also where several use one file. ConfigError, with what to do about it,
    where the file is missing, not private or too short.
    """
    given = job.network.secret_file
    assert given is not None, "checked with the job file"
    what, key = f'network.secret_file = "{given}"', "network.secret_file"
    path = Path(given)
    try:
        content = read_private(path, limit_bytes=MAX_SECRET_FILE_BYTES, modes=(0o600, 0o400))
    except AuthError as error:
        raise ConfigError(f"{what}: {error}; nearest valid: chmod 600 {path}", key=key) from error
    if content is None:
        raise ConfigError(
            f"{what}: no such file; make one with {HOW_TO_MAKE_ONE} and copy it to every node",
            key=key,
        )
    content = content.strip()
    if len(content) < SECRET_BYTES:
        raise ConfigError(
            f"{what}: holds {len(content)} bytes, at least {SECRET_BYTES} are needed; "
            f"make one with {HOW_TO_MAKE_ONE}",
            key=key,
        )
    return derive_key(content, f"job {job.job.name}")
