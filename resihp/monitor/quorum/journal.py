"""A node's journal: what its monitor promised and accepted, on disk before it says so.

One small file, replaced as a whole: written beside it, forced to the disk, renamed, and the
directory forced too. It holds a hash, so that damage is seen; a monitor that forgot what it
promised must not promise again.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from resihp.errors import JournalDamaged
from resihp.monitor.quorum.acceptor import Kept

__all__ = ["read_journal", "write_journal"]

_LIMIT_BYTES = 64 << 20
_HASH_BYTES = 32


def write_journal(path: Path, kept: Kept) -> None:
    """`kept` survives the machine when this returns. OSError where the disk refuses it."""
    body = msgspec.msgpack.encode(kept)
    beside = path.with_name(path.name + ".new")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(hashlib.sha256(body).digest() + body)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_journal(path: Path, *, was_written: bool = False) -> Kept:
    """What was written last; nothing without a journal. JournalDamaged where it is not whole, or
    is gone though it `was_written`."""
    try:
        with path.open("rb") as file:
            content = file.read(_LIMIT_BYTES + 1)
    except FileNotFoundError:
        if was_written:
            raise JournalDamaged(f"the journal {path} is gone") from None
        return Kept()
    digest, body = content[:_HASH_BYTES], content[_HASH_BYTES:]
    if len(content) > _LIMIT_BYTES or hashlib.sha256(body).digest() != digest:
        raise JournalDamaged(f"the journal {path} is damaged: its hash is another")
    try:
        return msgspec.msgpack.decode(body, type=Kept)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JournalDamaged(f"the journal {path} is damaged: {error}") from error
