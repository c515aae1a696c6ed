"""A model of the user's own: the function that `[model] factory` names."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

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

    An error inside the function is the user's to see: it passes as it is.
    """
    assert config.factory is not None
    module_name, _, name = config.factory.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # something that the user's module imports
        raise ConfigError(
            f'[model] factory = "{config.factory}": no module {error.name} in '
            f"{', '.join(path or '.' for path in sys.path)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f'[model] factory = "{config.factory}": no function {name} in {module.__file__}'
        )
    model: Any = function(config)
    for ours, theirs in _SIZES.items():
        actual, said = getattr(model, ours, None), getattr(config, theirs)
        if actual != said:
            raise ConfigError(
                f'[model] factory = "{config.factory}": its {ours} is {actual}, and {theirs} is '
                f"{said}; nearest valid: {theirs} = {actual}"
            )
    return model
