"""A plain PyTorch transformer for plans: nothing in it knows of ranks, stages or split backward.

From the root of the repository: `resihp train examples/own_stage/job.toml`.

Shapes: T tokens of a micro-batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from resihp.executor.models.module import ModuleModel, Piece

if TYPE_CHECKING:
    from resihp.config import ModelConfig
    from resihp.executor.packing import MicroBatch

MAX_POSITIONS = 4096


class Embedding(nn.Module):
    """Tokens and learned positions."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(MAX_POSITIONS, hidden_size)

    def forward(self, ids_T: Tensor, position_ids_T: Tensor) -> Tensor:
        """Shape (T, D)."""
        return self.tokens(ids_T) + self.positions(position_ids_T % MAX_POSITIONS)


class Head(nn.Module):
    """The final norm and the logits."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.logits = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Shape (T, V)."""
        return self.logits(self.norm(x_TD))


def encode(layer: nn.TransformerEncoderLayer, x_TD: Tensor, batch: MicroBatch) -> Tensor:
    """One of torch's own layers over the packed window; a token sees its document's past only."""
    document_T = (batch.position_ids_T == 0).cumsum(0)
    hidden_TT = (document_T[:, None] != document_T[None, :]) | torch.ones(
        len(document_T), len(document_T), dtype=torch.bool, device=x_TD.device
    ).triu(1)
    return layer(x_TD[None], src_mask=hidden_TT)[0]


def transformer(config: ModelConfig) -> ModuleModel:
    """What `[model] factory` names: the model of the sizes in the job file."""
    vocab, hidden = config.vocab_size, config.hidden_size
    build_layer = partial(
        nn.TransformerEncoderLayer,
        hidden,
        config.num_attention_heads,
        config.intermediate_size,
        dropout=0.0,
        batch_first=True,
        norm_first=True,
    )
    return ModuleModel(
        embedding=Piece(
            partial(Embedding, vocab, hidden),
            lambda module, batch: module(batch.input_ids_T, batch.position_ids_T),
        ),
        layers=[Piece(build_layer, encode)] * config.num_hidden_layers,
        head=Piece(partial(Head, vocab, hidden), lambda module, x_TD, batch: module(x_TD)),
        hidden_size=hidden,
        vocab_size=vocab,
    )
