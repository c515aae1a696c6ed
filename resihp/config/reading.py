"""The job file: from TOML to a checked `JobConfig`."""

from __future__ import annotations

from pathlib import Path

from resihp.config.checks import problems
from resihp.config.schema import JobConfig
from resihp.config.toml import read_file, read_text

__all__ = ["load", "loads"]


def load(path: str | Path) -> JobConfig:
    """Read a job file. Raises ConfigError when it cannot be read or says something impossible."""
    return read_file(path, JobConfig, problems)


def loads(text: str, path: str = "<job>") -> JobConfig:
    """Read a job from TOML text; `path` names it in errors. Raises ConfigError."""
    return read_text(text, JobConfig, problems, path=path)
