"""The models that a job file can name, behind `resihp.executor.model.Model`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.executor.models.factory import model_of_factory
from resihp.executor.models.llama import Llama

if TYPE_CHECKING:
    from resihp.config import ModelConfig
    from resihp.executor.model import Model

__all__ = ["Llama", "build_model"]


def build_model(config: ModelConfig) -> Model:
    """The model that `config` describes. ConfigError where its factory is not there."""
    return Llama(config) if config.factory is None else model_of_factory(config)
