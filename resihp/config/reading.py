"""The job file: from TOML to a checked `JobConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from resihp.config.checks import problems
from resihp.config.hugging_face import MAX_CONFIG_BYTES, model_table
from resihp.config.schema import JobConfig
from resihp.config.toml import read_file, read_text
from resihp.errors import ConfigError

__all__ = ["load", "loads"]

_CONFIG = "model.config"


def load(path: str | Path) -> JobConfig:
    """Read a job file. Raises ConfigError when it cannot be read or says something impossible.

    `[model] config = "…/config.json"` stands for what that file says of the model; the path is
    relative to the job file, and keys beside it win.
    """
    return read_file(
        path,
        JobConfig,
        problems,
        lambda document: _filled(document, Path(path).parent),
    )


def loads(text: str, path: str = "<job>") -> JobConfig:
    """Read a job from TOML text; `path` names it in errors. Raises ConfigError.

    The path of a model's `config` is relative to the working directory.
    """
    return read_text(
        text, JobConfig, problems, lambda document: _filled(document, Path()), path=path
    )


def _filled(document: dict[str, Any], here: Path) -> dict[str, Any]:
    """The document with the model's own file, and numerics that go with the precision."""
    return _with_numerics(_with_model(document, here))


def _with_numerics(document: dict[str, Any]) -> dict[str, Any]:
    section: object = document.get("compute")
    if not isinstance(section, dict):
        return document
    said = cast("dict[str, object]", section)
    if said.get("precision") != "bf16" or "numerics" in said:
        return document
    return document | {"compute": said | {"numerics": "fast"}}


def _with_model(document: dict[str, Any], here: Path) -> dict[str, Any]:
    """The document with the model's own file read into its section."""
    section: object = document.get("model")
    if not isinstance(section, dict) or "config" not in section:
        return document
    said = dict(cast("dict[str, object]", section))
    config = said.pop("config")
    if not isinstance(config, str):
        raise ConfigError("must be the path of a config.json", key=_CONFIG)
    path = here / config
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        return document | {"model": model_table(data, str(path)) | said}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", key=_CONFIG) from error
    except ConfigError as error:
        raise ConfigError(str(error), key=_CONFIG) from None
