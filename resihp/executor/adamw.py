"""AdamW and its learning rate (Loshchilov and Hutter 2019).

The update of an element must not depend on where in a shard it lies, or the same model would
differ between TP layouts. Vectorised kernels and their scalar tails agree on the single
operations mul, add, div and sqrt, which IEEE 754 rounds one way only. Fused ones (addcmul, lerp,
add with a factor) may round once or twice, as each kernel was compiled, so none is used.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["AdamW", "AdamWConfig", "learning_rate"]


_CPU_BLOCK = 1 << 17
"""Elements that are updated at a time: what the dozen passes touch stays in the cache."""
_BLOCK = 1 << 24
"""On other devices: few launches, and a scratch that is small beside the model."""


class AdamWConfig(Protocol):
    """Hyperparameters other than the learning rate, which each step brings."""

    @property
    def beta1(self) -> float:
        """Decay of the first moment."""
        ...

    @property
    def beta2(self) -> float:
        """Decay of the second moment."""
        ...

    @property
    def eps(self) -> float:
        """Added to the root of the second moment."""
        ...

    @property
    def weight_decay(self) -> float:
        """Decoupled decay, of matrices only."""
        ...


class AdamW:
    """Moments of a set of shards; `parameters` are changed in place.

    `exp_avg`, `exp_avg_sq` (fp32, by name) and `num_steps` are the whole state: moving them with
    the parameters moves the optimizer.
    """

    def __init__(
        self,
        config: AdamWConfig,
        parameters: Mapping[str, Tensor],
        *,
        exp_avg: Mapping[str, Tensor] | None = None,
        exp_avg_sq: Mapping[str, Tensor] | None = None,
        num_steps: int = 0,
    ) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self.exp_avg = _zeros_like(parameters) if exp_avg is None else dict(exp_avg)
        self.exp_avg_sq = _zeros_like(parameters) if exp_avg_sq is None else dict(exp_avg_sq)
        self.num_steps = num_steps
        """Updates done; the bias correction depends on it."""
        assert self.parameters.keys() == self.exp_avg.keys() == self.exp_avg_sq.keys()

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], lr: float, grad_scale: float = 1.0) -> None:
        """One update with `grads` times `grad_scale` (clipping); `grads` stay as they are."""
        assert grads.keys() == self.parameters.keys()
        self.num_steps += 1
        for name, parameter in self.parameters.items():
            decay = 1.0 - lr * self.config.weight_decay if parameter.dim() == 2 else 1.0
            size = _CPU_BLOCK if parameter.device.type == "cpu" else _BLOCK
            state = parameter, self.exp_avg[name], self.exp_avg_sq[name]
            blocks = (torch.split(tensor.view(-1), size) for tensor in state)
            grad_blocks = torch.split(grads[name].reshape(-1), size)
            for part, mean, mean_sq, grad in zip(*blocks, grad_blocks, strict=True):
                self._update(part, mean, mean_sq, grad * grad_scale, lr, decay)

    def _update(
        self,
        parameter: Tensor,
        mean: Tensor,
        mean_sq: Tensor,
        grad: Tensor,
        lr: float,
        decay: float,
    ) -> None:
        """Update one run of a shard; `grad` is used as scratch."""
        config = self.config
        scratch = grad * (1.0 - config.beta1)
        mean.mul_(config.beta1).add_(scratch)
        torch.mul(grad, grad, out=scratch)
        mean_sq.mul_(config.beta2).add_(scratch.mul_(1.0 - config.beta2))
        # p -= lr * (mean / c1) / (sqrt(mean_sq / c2) + eps), with the corrections c1 and c2.
        root = torch.sqrt(mean_sq, out=scratch)
        root.div_(math.sqrt(1.0 - config.beta2**self.num_steps)).add_(config.eps)
        change = torch.div(mean, root, out=grad).mul_(lr / (1.0 - config.beta1**self.num_steps))
        if decay != 1.0:
            parameter.mul_(decay)
        parameter.sub_(change)


def _zeros_like(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameter, dtype=torch.float32)
        for name, parameter in parameters.items()
    }


def learning_rate(
    step: int, *, peak: float, floor: float, num_warmup_steps: int, num_steps: int
) -> float:
    """Learning rate of step `step` (from 0): linear warm-up to `peak`, then a cosine to `floor`.

    The warm-up's first step has `peak / num_warmup_steps`, its last `peak`; step `num_steps - 1`
    and all later ones have `floor` (with no step left after the warm-up, the cosine is skipped).
    """
    if step < num_warmup_steps:
        return peak * (step + 1) / num_warmup_steps
    num_cosine = num_steps - num_warmup_steps
    progress = 1.0 if num_cosine <= 0 else min(1.0, (step - num_warmup_steps + 1) / num_cosine)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
