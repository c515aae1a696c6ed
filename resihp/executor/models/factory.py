"""A model of the user's own: the function that `[model] factory` names."""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from resihp.errors import ConfigError

if TYPE_CHECKING:
    from resihp.config import ModelConfig
    from resihp.executor.model import Model

__all__ = ["model_of_factory"]

_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
}
"""What plans and messages are made for, by its name in the model and in the job file."""


def model_of_factory(config: ModelConfig) -> Model:
    """What the function returns for `config`; ConfigError where it is not there or does not fit.

    An error inside the user's code is the cause of that ConfigError, which says where it came from.
    """
    assert config.factory is not None
    here = f'[model] factory = "{config.factory}"'
    module_name, _, name = config.factory.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if _is_absent(error, module_name):
            raise ConfigError(f"{here}: no module {error.name} in {_searched()}") from None
        raise ConfigError(f"{here}: importing it raised {_told(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        file = getattr(module, "__file__", None) or f"the built-in module {module_name}"
        raise ConfigError(f"{here}: no function {name} in {file}")
    try:
        model: Any = function(config)
    except Exception as error:
        raise ConfigError(f"{here}: raised {_told(error)}") from error
    for ours, theirs in _SIZES.items():
        actual, said = getattr(model, ours, None), getattr(config, theirs)
        if actual is None:
            raise ConfigError(
                f"{here}: it returned a {type(model).__name__}, which has no {ours}; models are "
                "`resihp.executor.model.Model`s, such as a `ModuleModel`"
            )
        if actual != said:
            raise ConfigError(
                f"{here}: its {ours} is {actual}, and {theirs} is {said}; "
                f"nearest valid: {theirs} = {actual}"
            )
    return model


def _is_absent(error: Exception, module_name: str) -> TypeGuard[ModuleNotFoundError]:
    """Whether the user's module is not there, rather than something that it imports."""
    return (
        isinstance(error, ModuleNotFoundError)
        and error.name is not None
        and f"{module_name}.".startswith(f"{error.name}.")
    )


def _searched() -> str:
    """Where a module of the user's may be."""
    path = os.environ.get("PYTHONPATH")
    return (
        f"{Path.cwd()} or {'PYTHONPATH, which is not set' if not path else f'PYTHONPATH ({path})'}"
    )


def _told(error: Exception) -> str:
    """The error in one line, with the line of the user's code that raised it, if it is there."""
    words = " ".join(str(error).split())
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = (
        ""
        if frame.filename in (__file__, importlib.__file__)
        else f" ({frame.filename}:{frame.lineno})"
    )
    return f"{type(error).__name__}: {words}{place}"
