"""A model of the user's own whose last stage stops at a named pipe until somebody opens it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from resihp.executor.models.module import ModuleModel, Piece

if TYPE_CHECKING:
    from resihp.config import ModelConfig
    from resihp.executor.packing import MicroBatch

PIPE = "RESIHP_TEST_PIPE"
RANK = "RESIHP_TEST_HANGS"
"""The rank that hangs; not set: all that have the head."""


def model(config: ModelConfig) -> ModuleModel:
    """An embedding, linear layers and a head; the fifth micro-batch at the head hangs."""
    hidden, vocab = config.hidden_size, config.vocab_size
    seen: list[int] = []

    def head(module: nn.Module, x_TD: Tensor, _: MicroBatch) -> Tensor:
        seen.append(1)
        if len(seen) == 5 and os.environ.get(RANK) in (None, os.environ["RANK"]):
            Path(os.environ[PIPE]).read_bytes()
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
