"""What a node's owner hands to each incarnation of the monitor, and what one leaves the next.

Both are anonymous memory files that are inherited: nothing of them is in an argument, in an
environment or on a disk, and they live as long as the owner does.
"""

from __future__ import annotations

import os

import msgspec

from resihp.config import JobConfig, loads
from resihp.wire.auth import masked_repr
from resihp.wire.nodes import StopAsked

__all__ = ["Brief", "Note", "NoteFile", "brief_file", "read_brief"]

_NOTE_BYTES = 4096
_LENGTH_BYTES = 4


class Brief(msgspec.Struct, frozen=True, kw_only=True):
    """Of one node of one job; the same for every incarnation of its monitor."""

    job: str
    """The job file, resolved."""
    secret: bytes
    node: int
    addresses: tuple[tuple[str, int], ...]
    """Where the monitor of each node listens."""
    run_dir: str | None
    """None: the first coordinator makes it and says where it is."""
    leader: tuple[str, ...] = ("-m", "resihp.monitor.leader")
    """What Python runs as coordinator."""
    nodes_return: bool = True
    """Whether a node whose owner is gone may be started again, at the same address."""

    def __repr__(self) -> str:
        return masked_repr(self, "secret")

    def job_config(self) -> JobConfig:
        """The job."""
        return loads(self.job)

    def node_of(self, rank: int, world: int) -> int:
        """The node that `rank` is on: nodes hold equally many ranks, in order."""
        return rank // (world // len(self.addresses))

    def ranks(self, node: int, world: int) -> range:
        """The ranks of `node`."""
        per_node = world // len(self.addresses)
        return range(node * per_node, (node + 1) * per_node)


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What a monitor knows that its successor must know too."""

    num_starts: int = 0
    run_dir: str | None = None
    has_journal: bool = False
    """Something was promised: without a journal nobody knows what."""
    exit_code: int | None = None
    """Of the job; None: it is not over."""
    reason: str = ""
    lost_nodes: tuple[int, ...] = ()
    """Of the job's nodes, at its end."""
    stop: StopAsked | None = None
    """What every coordinator is told until the job is over."""


def brief_file(brief: Brief) -> int:
    """An anonymous file with the brief."""
    fd = os.memfd_create("resihp-brief", 0)
    content = msgspec.msgpack.encode(brief)
    assert os.pwrite(fd, content, 0) == len(content)
    return fd


def read_brief(fd: int) -> Brief:
    """What `brief_file` wrote; may be read any number of times."""
    return msgspec.msgpack.decode(os.pread(fd, os.fstat(fd).st_size, 0), type=Brief)


class NoteFile:
    """A note in an anonymous file of one page, so that no death leaves half of one."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("resihp-note", 0) if fd is None else fd

    def read(self) -> Note:
        """The newest note; an empty one where none was written."""
        content = os.pread(self.fd, _NOTE_BYTES, 0)
        if not content:
            return Note()
        length = int.from_bytes(content[:_LENGTH_BYTES], "big")
        return msgspec.msgpack.decode(content[_LENGTH_BYTES : _LENGTH_BYTES + length], type=Note)

    def write(self, note: Note) -> None:
        """Replace the note; a reason that is too long for the page is cut."""
        body = msgspec.msgpack.encode(note)
        excess = _LENGTH_BYTES + len(body) - _NOTE_BYTES
        if excess > 0:
            short = note.reason.encode()[: -excess - 8].decode(errors="ignore")
            body = msgspec.msgpack.encode(msgspec.structs.replace(note, reason=short))
        page = len(body).to_bytes(_LENGTH_BYTES, "big") + body
        os.pwrite(self.fd, page.ljust(_NOTE_BYTES, b"\0"), 0)
