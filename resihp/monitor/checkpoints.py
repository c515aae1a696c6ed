"""Saved versions as the coordinator's process handles them: what there is, completing, pruning.

All of it is work on files: call it on a thread where a loop runs. Who decides is
`resihp.monitor.coordination.saving`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from resihp.checkpoint.disk import open_folder
from resihp.checkpoint.manifest import Manifest, Position
from resihp.checkpoint.versions import (
    Listed,
    complete,
    discard,
    list_versions,
    newest_complete,
    parse_name,
    prune,
    read_parts,
    version_name,
)
from resihp.config import JobConfig
from resihp.errors import CheckpointRefused, ConfigError
from resihp.monitor.saved_model import model_difference

__all__ = [
    "SavePlace",
    "SavedVersion",
    "check_place",
    "complete_version",
    "drop",
    "make_directory",
    "position_difference",
    "position_of",
    "save_place",
    "saved_version",
    "versions_of",
]

DIRECTORY = "checkpoints"
"""In the run's directory, where the job file names none."""


class SavedVersion(NamedTuple):
    """A complete version that the job may go back to."""

    step: int
    name: str
    updates: int
    position: Position
    num_bytes: int
    """Of its tensors."""


class SavePlace(NamedTuple):
    """Where the versions of this run are, and which it may begin from."""

    directory: str
    run: str
    versions: tuple[SavedVersion, ...]
    """Newest first."""
    troubles: tuple[str, ...]
    """Why others were refused."""


def save_place(job: JobConfig, run_dir: Path) -> SavePlace | None:
    """Of the run in `run_dir`: its own versions, and all that are there where it resumes.

    None for emulated devices, which hold no state.
    """
    if job.device.kind == "emulated":
        return None
    run = run_dir.name
    directory = versions_of(job, run_dir)
    own = parse_name(version_name(0, run, 0))
    assert own is not None
    listed = [
        each
        for each in list_versions(directory)
        if job.checkpoint.resume or each.version.run == own.run
    ]
    versions = [
        saved_version(each.name, each.manifest) for each in listed if each.manifest is not None
    ]
    troubles = tuple(each.trouble for each in listed if each.trouble)
    return SavePlace(str(directory), run, tuple(versions), troubles)


def saved_version(name: str, manifest: Manifest) -> SavedVersion:
    """The complete version `name`."""
    return SavedVersion(
        manifest.step, name, manifest.updates, manifest.position, manifest.data_bytes
    )


def versions_of(job: JobConfig, run_dir: Path) -> Path:
    """Where the run in `run_dir` keeps its versions."""
    return _directory(job) or (run_dir / DIRECTORY).absolute()


def check_place(job: JobConfig) -> None:
    """ConfigError where the job could not begin from, or write to, its directory of versions."""
    directory = _directory(job)
    if directory is None:
        return
    try:
        newest, troubles = newest_complete(directory)
    except NotADirectoryError as error:
        raise ConfigError(
            f'checkpoint.dir = "{job.checkpoint.dir}" is not a directory', key="checkpoint.dir"
        ) from error
    if job.checkpoint.resume:
        if newest is None:
            why = troubles[0] if troubles else "there is none in it"
            raise ConfigError(
                f'no complete version to resume from in "{job.checkpoint.dir}": {why}',
                key="checkpoint.resume",
            )
        _check_resumable(job, directory, newest)
    elif newest is not None:
        raise ConfigError(
            f'checkpoint.dir = "{job.checkpoint.dir}" holds versions of another run (step '
            f"{newest.version.step}): set resume = true to go on from them, or name another "
            "directory",
            key="checkpoint.dir",
        )


def _check_resumable(job: JobConfig, directory: Path, newest: Listed) -> None:
    """ConfigError where the job would not go on from the newest version, intact as that is.

    The text is compared later: its digest is known once executors have read it.
    """
    manifest = newest.manifest
    assert manifest is not None
    here = position_of(job, manifest.position.dataset)
    what = f"version {directory / newest.name} cannot be resumed by this job"
    if manifest.step > job.job.steps:
        raise ConfigError(
            f"{what}: it is of step {manifest.step}, and job.steps = {job.job.steps}; nearest "
            f"valid: job.steps = {manifest.step}",
            key="job.steps",
        )
    if other := position_difference(manifest.position, here):
        raise ConfigError(f"{what}: {other}", key="checkpoint.resume")
    if job.model.factory is not None:
        return  # only the user's module knows its tensors
    try:
        with open_folder(directory) as parent, parent.inside(newest.name) as folder:
            parts = read_parts(folder, manifest)
    except OSError as error:
        raise ConfigError(
            f"{directory / newest.name}: {error.strerror}", key="checkpoint.resume"
        ) from error
    saved = {name: each.shape for part in parts.values() for name, each in part.tensors.items()}
    if other := model_difference(saved, job.model):
        raise ConfigError(f"{what}: it is of another model: {other}", key="checkpoint.resume")


def position_of(job: JobConfig, dataset: str) -> Position:
    """Where `job` is in the text whose digest is `dataset`."""
    return Position(
        dataset=dataset,
        seed=job.job.seed,
        tokens=job.batch.tokens,
        num_microbatches=job.parallel.dp * job.batch.microbatches,
    )


def position_difference(saved: Position, job: Position) -> str:
    """What would not go on where the saved run was; '' where all does."""
    if saved.dataset != job.dataset:
        return "it was trained on other data (the dataset digests differ)"
    for name, said in (
        ("seed", "job.seed"),
        ("tokens", "batch.tokens"),
        ("num_microbatches", "parallel.dp times batch.microbatches"),
    ):
        there, here = getattr(saved, name), getattr(job, name)
        if there != here:
            return f"it was trained with {said} = {there}, and this job has {here}"
    return ""


def _directory(job: JobConfig) -> Path | None:
    """The one that the job file names."""
    return Path(job.checkpoint.dir).absolute() if job.checkpoint.dir is not None else None


def make_directory(place: SavePlace) -> None:
    """Make the directory of versions that the job file names. ConfigError where it cannot be.

    The one in a run's own directory is made with the first version: few runs save any.
    """
    try:
        os.makedirs(place.directory, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"versions cannot be saved in {place.directory}: {error.strerror}",
            key="checkpoint.dir",
        ) from error


def complete_version(
    directory: Path, name: str, manifest: Manifest, *, keep: int, spared: Collection[str] = ()
) -> tuple[str, list[str]]:
    """Mark a version complete and prune older ones: why it could not be, and what was pruned.

    Those in `spared` stay, and are none of the `keep`.
    """
    try:
        complete(directory, name, manifest)
    except CheckpointRefused as error:
        drop(directory, name)
        return str(error), []
    except OSError as error:
        drop(directory, name)
        return f"{error.filename or directory}: {error.strerror}", []
    pruned: list[str] = []
    # Where the disk is at fault the next one prunes again.
    with contextlib.suppress(OSError):
        pruned.extend(prune(directory, keep, spared, newest=name))
    return "", pruned


def drop(directory: Path, name: str) -> None:
    """Remove an unfinished version, as far as the disk allows: nobody will take it for one."""
    try:
        discard(directory, name)
    except OSError:
        return
