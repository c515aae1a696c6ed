"""What the processes of a job take of the machine, read from /proc while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Growth", "Usage", "growth_of", "shared_memory", "tagged", "usage_of"]


class Usage(NamedTuple):
    """Of one process."""

    fds: int
    threads: int
    rss_mib: float


class Growth(NamedTuple):
    """How much more a process has late in its life than early, the most of all processes."""

    fds: int
    threads: int
    rss_mib: float


def tagged(entry: str) -> set[int]:
    """All processes whose environment has `entry` ("NAME=value")."""
    wanted = entry.encode()
    found = set[int]()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            has = wanted in environ.read_bytes().split(b"\0")
        except OSError:
            continue  # it ended, or is not ours
        if has:
            found.add(int(environ.parent.name))
    return found


def usage_of(pids: Iterable[int]) -> dict[int, Usage]:
    """Of those of `pids` that are there."""
    found: dict[int, Usage] = {}
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            num_fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            rss_mib = int(fields["VmRSS"].split()[0]) / 1024
            found[pid] = Usage(num_fds, int(fields["Threads"]), rss_mib)
        except (OSError, KeyError):
            continue  # it ended; a dead process has no memory
    return found


def growth_of(history: Mapping[int, Sequence[Usage]], *, least: int) -> Growth:
    """Least of the last quarter against most of the first half, of processes seen `least` times.

    Old groups are released in the background, so only what stays counts.
    """
    growths = [Growth(0, 0, 0.0)]
    for seen in history.values():
        if len(seen) < least:
            continue
        early, late = seen[: len(seen) // 2], seen[-(len(seen) // 4) :]
        growths.append(
            Growth(
                min(u.fds for u in late) - max(u.fds for u in early),
                min(u.threads for u in late) - max(u.threads for u in early),
                min(u.rss_mib for u in late) - max(u.rss_mib for u in early),
            )
        )
    return Growth(
        max(g.fds for g in growths),
        max(g.threads for g in growths),
        max(g.rss_mib for g in growths),
    )


def shared_memory(run: str) -> set[str]:
    """Names in /dev/shm of the run `run`."""
    return {path.name for path in Path("/dev/shm").glob("resihp-*") if run in path.name}
