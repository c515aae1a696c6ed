"""What killed jobs left: snapshots in memory, rendezvous files, files of coordinators.

Only what is of this user, and whose owner is gone, is ever named or removed.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from resihp.errors import ResihpError
from resihp.monitor.doctor.finding import Finding, note, problem, well
from resihp.monitor.rendezvous import read_place, rendezvous_folder
from resihp.wire.shared_memory import SHM, stale_dirs

__all__ = ["check_leftovers", "stale_controls", "stale_rendezvous"]

TOPIC = "leftovers"
_RENDEZVOUS = re.compile(r"resihp-(?P<uid>\d+)-(?P<agent>\d+)-[A-Za-z0-9_-]*-\d+(\.[0-9a-f]{16})?")
CONNECT_S = 1.0


def check_leftovers(
    runs_dir: Path, *, clean: bool, env: Mapping[str, str] = os.environ, shm: Path = SHM
) -> Iterator[Finding]:
    """All of it; `clean` removes it."""
    found: list[Path] = list(stale_dirs(shm, clean=clean))
    files = [*stale_rendezvous(rendezvous_folder(env)), *stale_controls(runs_dir)]
    if clean:
        for path in files:
            path.unlink(missing_ok=True)
    found += files
    for path in found:
        if clean:
            yield note(TOPIC, f"removed {path}")
        else:
            yield problem(TOPIC, f"{path} was left by a killed job; remove it with --clean")
    if not found:
        yield well(TOPIC, f"none under {shm}, {rendezvous_folder(env)} and {runs_dir}")


def stale_rendezvous(folder: Path) -> Iterator[Path]:
    """Rendezvous files of this user whose torchrun agent is gone."""
    for path in sorted(folder.glob(f"resihp-{os.getuid()}-*")):
        match = _RENDEZVOUS.fullmatch(path.name)
        if match is None or not _is_ours(path):
            continue
        if not Path(f"/proc/{match['agent']}").exists():
            yield path


def stale_controls(runs_dir: Path) -> Iterator[Path]:
    """Files of this user by which operators would reach coordinators that nobody hears of."""
    for path in sorted(runs_dir.glob("*/control")):
        if _is_ours(path) and not _is_heard(path):
            yield path


def _is_heard(control: Path) -> bool:
    """Whether somebody listens there; in doubt yes."""
    try:
        place = read_place(control)
        if place is None:
            return True  # it ended just now
        socket.create_connection((place.host, place.port), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    except (OSError, ResihpError):
        return True
    return True


def _is_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
