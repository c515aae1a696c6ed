"""What would stop a job before its first step, found before any process is started."""

from __future__ import annotations

import os
from pathlib import Path

from resihp.config import JobConfig, place_of
from resihp.errors import ConfigError, NoFeasiblePlan, UserError
from resihp.ir.expand import expand
from resihp.ir.model import Plan
from resihp.monitor.checkpoints import check_place
from resihp.monitor.planner import Planner

__all__ = ["check_job"]

_KINDS = ("cpu", "cuda", "emulated")
"""Kinds of devices that the executor opens."""


def check_job(job: JobConfig, path: str | Path) -> None:
    """Raise UserError, naming key, file and line, for what can be seen from here.

    `path` is the file that `job` was read from.
    """
    try:
        _check(job)
    except UserError as error:
        if error.key is not None:
            error.args = (f"{place_of(path, error.key)}: {error}",)
        raise


def _check(job: JobConfig) -> None:
    _check_device(job.device.kind)
    _check_data(job.data.source)
    _check_runs_dir(Path(job.job.runs_dir))
    check_place(job)
    try:
        first = Planner(job).initial()
    except NoFeasiblePlan as error:
        raise ConfigError(
            f'device.memory = "{job.device.memory}": {error}', key="device.memory"
        ) from error
    _check_places(job, first.plan)


def _check_places(job: JobConfig, plan: Plan) -> None:
    """Faults at instructions that the program has not. Only those before which no other fault
    strikes: after a loss it is another program."""
    by_chance = any(each.rate is not None for each in job.inject)
    steps = [each.step for each in job.inject if each.step is not None]
    if by_chance or not steps:
        return
    for index, each in enumerate(job.inject):
        if each.step != min(steps) or each.instruction is None or each.rank is None:
            continue
        if each.rank not in plan.active_ranks:
            continue
        num = len(expand(plan, each.rank).instrs)
        if each.instruction >= num:
            key = f"inject[{index}].instruction"
            raise ConfigError(
                f"{key} = {each.instruction}: the program of rank {each.rank} has {num} "
                f"instructions; nearest valid: {num - 1}",
                key=key,
            )


def _check_device(kind: str) -> None:
    if kind not in _KINDS:
        known = " or ".join(f'"{known}"' for known in _KINDS)
        raise ConfigError(
            f'device.kind = "{kind}": jobs do not run there yet; use {known}', key="device.kind"
        )


def _check_data(source: str) -> None:
    if source == "stdlib":
        return
    path = Path(source)
    what = f'data.source = "{source}"'
    if not path.is_dir():
        raise ConfigError(
            f'{what}: no such directory; name one with text files, or use "stdlib"',
            key="data.source",
        )
    if not any(entry.is_file() for entry in path.rglob("*")):
        raise ConfigError(f"{what}: the directory holds no file", key="data.source")


def _check_runs_dir(path: Path) -> None:
    """The directory is there and ours to write in, or can be made."""
    existing = next(
        parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists()
    )
    if not existing.is_dir():
        raise ConfigError(
            f'job.runs_dir = "{path}": {existing} is not a directory', key="job.runs_dir"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f'job.runs_dir = "{path}": {existing} is not writable', key="job.runs_dir"
        )
