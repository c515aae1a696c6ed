"""A model of the user's own in which one rank's weights change by themselves, as of bad memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from resihp.executor.models.module import ModuleModel, Piece

if TYPE_CHECKING:
    from resihp.config import ModelConfig
    from resihp.executor.packing import MicroBatch

DRIFTS = "3"
"""The rank; it holds the head."""


def model(config: ModelConfig) -> ModuleModel:
    """An embedding, linear layers and a head; in the seventh micro-batch one bit flips."""
    hidden, vocab = config.hidden_size, config.vocab_size
    seen: list[int] = []

    def head(module: nn.Module, x_TD: Tensor, _: MicroBatch) -> Tensor:
        seen.append(1)
        if len(seen) == 7 and os.environ["RANK"] == DRIFTS:
            weight = next(module.parameters()).data
            weight.view(-1).view(torch.int32)[0] ^= 1
        return module(x_TD)

    return ModuleModel(
        embedding=Piece(
            lambda: nn.Embedding(vocab, hidden), lambda module, batch: module(batch.input_ids_T)
        ),
        layers=[Piece(lambda: nn.Linear(hidden, hidden), lambda module, x_TD, _: module(x_TD))]
        * config.num_hidden_layers,
        head=Piece(lambda: nn.Linear(hidden, vocab, bias=False), head),
        hidden_size=hidden,
        vocab_size=vocab,
    )
