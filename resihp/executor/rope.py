"""Rotary position embeddings: the frequencies of each scaling, and their tables.

Frequency i of a head of E channels is theta^(-2i/E) (Su et al. 2021). A scaling stretches the
frequencies that a longer context would turn too far: `linear` all alike (Chen et al. 2023),
`llama3` the low ones (the Llama 3.1 release), `yarn` by turns over the original context (Peng et
al. 2023), with a factor on the scores too. The names are those of a Hugging Face `config.json`.

Shapes: T tokens, E head width, e half of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Rope", "RopeScaling", "rope_of", "rope_table"]


class RopeScaling(Protocol):
    """How the frequencies are stretched; what a kind does not read may be anything."""

    @property
    def rope_type(self) -> str:
        """`default`, `linear`, `llama3` or `yarn`."""
        ...

    @property
    def factor(self) -> float:
        """How much longer the context is than the original one."""
        ...

    @property
    def original_max_position_embeddings(self) -> int | None:
        """Tokens of the original context (llama3 and yarn have them)."""
        ...

    @property
    def low_freq_factor(self) -> float:
        """Turns over the original context below which a frequency is divided whole (llama3)."""
        ...

    @property
    def high_freq_factor(self) -> float:
        """Turns from which a frequency stays as it is (llama3)."""
        ...

    @property
    def beta_fast(self) -> float:
        """Turns over the original context from which a frequency stays as it is (yarn)."""
        ...

    @property
    def beta_slow(self) -> float:
        """Turns below which a frequency is divided whole (yarn)."""
        ...

    @property
    def attention_factor(self) -> float | None:
        """Factor on cosine and sine (yarn); None: 0.1 ln(factor) + 1."""
        ...


class Rope(NamedTuple):
    """Frequencies in radians per position, fp32, and the factor on cosine and sine."""

    frequencies_e: Tensor
    attention_factor: float

    def on(self, device: torch.device) -> Rope:
        """The same on `device`."""
        return Rope(self.frequencies_e.to(device), self.attention_factor)


def rope_of(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Rope:
    """The frequencies of a head of `head_dim` channels, on CPU."""
    exponents_e = torch.arange(0, head_dim, 2).float() / head_dim
    plain_e = 1.0 / theta**exponents_e
    if scaling is None or scaling.rope_type == "default":
        return Rope(plain_e, 1.0)
    if scaling.rope_type == "linear":
        return Rope(plain_e / scaling.factor, 1.0)
    if scaling.rope_type == "llama3":
        return Rope(_by_turns(plain_e, scaling), 1.0)
    assert scaling.rope_type == "yarn", f"rope_type {scaling.rope_type}"
    given = scaling.attention_factor
    attention_factor = given if given is not None else _yarn_attention_factor(scaling.factor)
    return Rope(_by_channel(plain_e, theta, scaling), attention_factor)


def _by_turns(plain_e: Tensor, scaling: RopeScaling) -> Tensor:
    """llama3: kept above `high` turns over the original context, divided below `low`."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns_e = _original_context(scaling) * plain_e / (2.0 * math.pi)
    kept_e = ((turns_e - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept_e) * plain_e / scaling.factor + kept_e * plain_e


def _by_channel(plain_e: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """yarn: kept up to the channel that turns `beta_fast` times, divided from `beta_slow` on."""
    head_dim, context = 2 * len(plain_e), _original_context(scaling)

    def channel(turns: float) -> float:
        radians_per_position = 2.0 * math.pi * turns / context
        return -head_dim * math.log(radians_per_position) / (2.0 * math.log(theta))

    first = max(math.floor(channel(scaling.beta_fast)), 0)
    last = min(math.ceil(channel(scaling.beta_slow)), head_dim - 1)
    width = max(last - first, 1e-3)  # a step where both fall on one channel
    divided_e = ((torch.arange(len(plain_e)).float() - first) / width).clamp(0.0, 1.0)
    return plain_e / scaling.factor * divided_e + plain_e * (1.0 - divided_e)


def _original_context(scaling: RopeScaling) -> int:
    context = scaling.original_max_position_embeddings
    assert context is not None, f"{scaling.rope_type} without its original context"
    return context


def _yarn_attention_factor(factor: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0


def rope_table(position_ids_T: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Cosine and sine per token and frequency, each of shape (T, 1, e), fp32."""
    angles_T1e = position_ids_T.float()[:, None, None] * rope.frequencies_e
    cos_T1e, sin_T1e = angles_T1e.cos(), angles_T1e.sin()
    if rope.attention_factor == 1.0:
        return cos_T1e, sin_T1e
    return cos_T1e.mul_(rope.attention_factor), sin_T1e.mul_(rope.attention_factor)
