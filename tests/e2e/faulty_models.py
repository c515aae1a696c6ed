"""Models of the user's own in which something is wrong: an embedding, linear layers and a head."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from resihp.executor.models.module import ModuleModel, Piece

if TYPE_CHECKING:
    from resihp.config import ModelConfig
    from resihp.executor.packing import MicroBatch

PIPE = "RESIHP_TEST_PIPE"
HANGS = "RESIHP_TEST_HANGS"
"""The rank that hangs; not set: all that have the head."""
DRIFTS = "3"
"""The rank whose weights change by themselves; it holds the head."""


def hanging(config: ModelConfig) -> ModuleModel:
    """In its fifth micro-batch the head stops at a named pipe until somebody opens that."""

    def before(_: nn.Module, number: int) -> None:
        if number == 5 and os.environ.get(HANGS) in (None, os.environ["RANK"]):
            Path(os.environ[PIPE]).read_bytes()

    return _linear(config, before)


def drifting(config: ModelConfig) -> ModuleModel:
    """Before the seventh micro-batch one bit of the head flips, as of bad memory."""

    def before(head: nn.Module, number: int) -> None:
        if number == 7 and os.environ["RANK"] == DRIFTS:
            weight = next(head.parameters()).data
            weight.view(-1).view(torch.int32)[0] ^= 1

    return _linear(config, before)


def _linear(config: ModelConfig, before: Callable[[nn.Module, int], None]) -> ModuleModel:
    """`before` sees the head and how many micro-batches came to it, this one too."""
    hidden, vocab = config.hidden_size, config.vocab_size
    seen: list[int] = []

    def head(module: nn.Module, x_TD: Tensor, _: MicroBatch) -> Tensor:
        seen.append(1)
        before(module, len(seen))
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
