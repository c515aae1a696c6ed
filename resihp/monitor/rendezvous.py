"""How the supervisors of one machine find their node's monitor and share the job's secret.

`resihp train` hands down the port, and the secret in an anonymous memory file. Under torchrun,
local rank 0 writes both to a 0600 file named after the agent that is the parent of all workers.
The secret is never in an argument, an environment or a log.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from resihp.errors import AuthError, UserError
from resihp.monitor.private_file import read_private
from resihp.wire.address import LOOPBACK
from resihp.wire.auth import SECRET_BYTES, masked_repr

__all__ = [
    "HANDED_DOWN",
    "Place",
    "Rendezvous",
    "forget_restarts",
    "inherited",
    "inherited_from_launcher",
    "read_place",
    "rendezvous_folder",
    "rendezvous_path",
    "secret_file",
    "write_place",
]

SECRET_FD = "RESIHP_SECRET_FD"
PORT = "RESIHP_PORT"
MAX_PLACE_BYTES = 1024
RESTARTED = "RESIHP_RESTARTED"
HOST = "RESIHP_HOST"
HANDED_DOWN = frozenset({SECRET_FD, PORT, RESTARTED, HOST})
"""What is for supervisors only, never for an executor."""


class Place(msgspec.Struct, frozen=True):
    """Where the node's monitor listens, and the job's secret."""

    port: int
    secret: bytes
    host: str = LOOPBACK

    def __repr__(self) -> str:
        return masked_repr(self, "secret")


class Rendezvous(msgspec.Struct, frozen=True):
    """What `resihp train` handed down to a supervisor."""

    place: Place
    was_restarted: bool
    """It takes the place of one that died."""


def secret_file(secret: bytes) -> int:
    """An anonymous file with the secret, to be inherited by the supervisors."""
    fd = os.memfd_create("resihp-secret", 0)
    os.pwrite(fd, secret, 0)
    return fd


def inherited_from_launcher(env: Mapping[str, str]) -> bool:
    """Whether `resihp train` started us."""
    return SECRET_FD in env


def inherited(env: Mapping[str, str]) -> Rendezvous | None:
    """What `resihp train` handed down, None where somebody else started us."""
    if not inherited_from_launcher(env):
        return None
    secret_fd = int(env[SECRET_FD])
    secret = os.pread(secret_fd, SECRET_BYTES, 0)
    os.close(secret_fd)
    place = Place(int(env[PORT]), secret, env.get(HOST, LOOPBACK))
    return Rendezvous(place, RESTARTED in env)


def rendezvous_folder(env: Mapping[str, str]) -> Path:
    """Where the workers of the torchrun agents of this user find each other."""
    return Path(env.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def rendezvous_path(env: Mapping[str, str], parent_pid: int) -> Path:
    """The file that the workers of one torchrun agent share; no two agents have the same."""
    run = "".join(c for c in env.get("TORCHELASTIC_RUN_ID", "") if c.isalnum() or c in "-_")[:64]
    restart = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return rendezvous_folder(env) / f"resihp-{os.getuid()}-{parent_pid}-{run}-{restart}"


def forget_restarts(path: Path, env: Mapping[str, str]) -> None:
    """Remove what earlier starts of this agent's workers left: each has a file of its own.

    AuthError where one of them is not ours.
    """
    stem, _, _ = path.name.rpartition("-")
    for restart in range(int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))):
        earlier = path.with_name(f"{stem}-{restart}")
        try:
            earlier.unlink(missing_ok=True)
        except OSError as error:
            raise AuthError(f"{earlier} cannot be removed: {error.strerror}") from error


def write_place(path: Path, place: Place) -> None:
    """Write a place to a file that only this user can read, in one move.

    AuthError where something that is not ours is in its way.
    """
    # The folder may be shared: a name that nobody can guess is a name that nobody can occupy.
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.msgpack.encode(place))
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise AuthError(f"{path} cannot be written: {error.strerror}") from error


def read_place(path: Path) -> Place | None:
    """What `write_place` wrote, None where it is not there yet. AuthError: not a private file."""
    content = read_private(path, limit_bytes=MAX_PLACE_BYTES)
    if content is None:
        return None
    try:
        return msgspec.msgpack.decode(content, type=Place)
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is no rendezvous file") from error
