"""Whether a job's state fits where copies of it go, and its sockets into a process's limit."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from resihp.compiler.facts import num_parameters
from resihp.config import JobConfig
from resihp.ir.model import LayerRange
from resihp.monitor.doctor.finding import Finding, problem, well
from resihp.wire.shared_memory import SHM

__all__ = ["check_room", "snapshot_bytes", "state_bytes"]

TOPIC = "room"
NUM_SLOTS = 2
"""Snapshots of a rank in shared memory: the newest, and the one that is written."""
RUN_BYTES = 1 << 20
"""Less than this, and there is no room for the job file, the journal and the first plan."""
BYTES_PER_PARAMETER = 12
"""fp32: the parameter and the two moments of AdamW."""


def state_bytes(job: JobConfig) -> int:
    """Of the whole model's parameters and moments, once."""
    shape = job.model.shape(job.job.name)
    layers = LayerRange(0, job.model.num_hidden_layers - 1)
    return BYTES_PER_PARAMETER * num_parameters(shape, layers, 1)


def snapshot_bytes(job: JobConfig) -> int:
    """Of the snapshots in the shared memory of one node: every replica keeps its own."""
    if job.state.snapshot_every == 0 or job.device.kind == "emulated":
        return 0
    num_nodes = max(1, len(job.network.nodes))
    copies = 2 if job.state.buddy and num_nodes > 1 else 1
    return NUM_SLOTS * copies * job.parallel.dp * state_bytes(job) // num_nodes


def check_room(job: JobConfig, shm: Path = SHM) -> Iterator[Finding]:
    """Disk, shared memory and descriptors for `job` on this machine."""
    yield from _check_start(Path(job.job.runs_dir))
    needed = snapshot_bytes(job)
    if needed:
        yield _fits(shm, needed, "snapshots", "set [state] snapshot_every = 0 or enlarge it")
    if job.device.kind != "emulated":
        keep = job.checkpoint.keep if job.checkpoint.every else 0
        folder = Path(job.checkpoint.dir or job.job.runs_dir)
        what = f"checkpoints ({keep + 1} at a time)"
        yield _fits(
            _existing(folder), (keep + 1) * state_bytes(job), what, "name another [checkpoint] dir"
        )
    yield _check_descriptors(job)


def _check_start(runs_dir: Path) -> Iterator[Finding]:
    """Whether a run can have its directory: without, it does not start at all."""
    existing = _existing(runs_dir)
    instead = "the run cannot start there; name another job.runs_dir"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield problem(TOPIC, f"{existing} is not writable: {instead}")
    elif shutil.disk_usage(existing).free < RUN_BYTES:
        free = _mib(shutil.disk_usage(existing).free)
        yield problem(TOPIC, f"{existing}: {free} free: {instead}, or make room")


def _existing(path: Path) -> Path:
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def _fits(folder: Path, needed: int, what: str, instead: str) -> Finding:
    if not folder.is_dir():
        return problem(TOPIC, f"{folder} is not there; {what} go there: {instead}")
    if not os.access(folder, os.W_OK | os.X_OK):
        return problem(TOPIC, f"{folder} is not writable; {what} go there: {instead}")
    free = shutil.disk_usage(folder).free
    text = f"{folder}: {_mib(free)} free, {what} need {_mib(needed)}"
    return well(TOPIC, text) if needed <= free else problem(TOPIC, f"{text}; {instead}")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"


def _check_descriptors(job: JobConfig) -> Finding:
    """An executor has a connection each way to every peer, and gloo some more for each group."""
    needed = 64 + 6 * job.parallel.world
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{limit} descriptors for a process, a rank may need {needed}"
    if limit < needed:
        return problem(TOPIC, f"{text}; raise it with ulimit -n {needed}")
    return well(TOPIC, text)
