"""A model of nothing but tensors that are hard to cut: odd sizes, few heads, tied tables."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from layouts import SMALL
from torch import Tensor

from resihp.executor.keyed_random import keyed_seed
from resihp.executor.layouts import TensorLayout, local_shard, num_copies
from resihp.executor.model import DEFAULT_OPTIONS, Stage, StageOptions, tensors_of
from resihp.executor.tp import TensorParallel
from resihp.ir.program import Program
from resihp.ir.reshard import chunks_of_member

FINEST = 8
_OF_LAYER = {
    "norm": TensorLayout((5,), None, 1),
    "heads": TensorLayout((24, 2), 0, 8),
    "keys": TensorLayout((6, 3), 0, 2),
    "bias": TensorLayout((6,), 0, 2),
    "wide": TensorLayout((11, 2), 0, 11),
    "narrow": TensorLayout((2, 11), 1, 11),
}
_TABLE = TensorLayout((13, 2), 0, 13)


class OddModel:
    """As many layers as the plans of `layouts` have; it computes nothing."""

    num_layers = SMALL.num_hidden_layers
    hidden_size = SMALL.hidden_size
    vocab_size = 13
    tied = (("table", "head"),)

    def tensors(self, first: int, last: int) -> list[str]:
        names = ["table"] if first == 0 else []
        names += [f"{layer}.{name}" for layer in range(first, last + 1) for name in _OF_LAYER]
        return [*names, "head"] if last == self.num_layers - 1 else names

    def layer_of(self, name: str) -> int:
        outside = {"table": 0, "head": self.num_layers - 1}
        return outside[name] if name in outside else int(name.split(".")[0])

    def layout(self, name: str) -> TensorLayout:
        return _TABLE if name in ("table", "head") else _OF_LAYER[name.split(".")[1]]

    def initial(self, name: str, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(keyed_seed(seed, name.replace("head", "table")))
        return torch.empty(self.layout(name).shape).normal_(generator=generator)

    def stage(
        self,
        first: int,
        last: int,
        tp: TensorParallel,
        parameters: Mapping[str, Tensor],
        options: StageOptions = DEFAULT_OPTIONS,
    ) -> Stage:
        raise NotImplementedError


ODD = OddModel()


def logical(seed: int) -> dict[str, Tensor]:
    """Random whole tensors, with magnitudes that make additions round."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name in ODD.tensors(0, ODD.num_layers - 1):
        shape = ODD.layout(name).shape
        tensors[name] = torch.empty(shape).normal_(generator=generator)
        tensors[name] *= 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    return tensors


def shards(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the rank of `program` holds of the logical `tensors`."""
    return {
        name: local_shard(ODD.layout(name), tensors[name], program.tp, program.tp_index)
        for name in tensors_of(ODD, program.layers)
    }


def partial_gradients(program: Program, seed: int) -> dict[str, Tensor]:
    """A micro-batch's gradients as W gives them: of copies, this member's part.

    The whole gradient of a unit with copies is a sum of `FINEST` parts, one per finest chunk.
    """
    whole = logical(seed)
    found = shards(program, whole)
    for name in found:
        layout = ODD.layout(name)
        copies = num_copies(layout, program.tp)
        if copies > 1:
            chunks = chunks_of_member(program.tp_index, program.tp, FINEST)
            parts = [fine_part(name, found[name], seed, chunk) for chunk in chunks]
            found[name] = torch.stack(parts).sum(0)
    return found


def fine_part(name: str, unit: Tensor, seed: int, chunk: int) -> Tensor:
    """What the readers of one finest chunk add to the gradient of a unit's copies."""
    per_unit = FINEST // ODD.layout(name).units
    generator = torch.Generator().manual_seed(keyed_seed(seed, name, chunk // per_unit))
    weights = torch.rand(per_unit, generator=generator)
    return unit * (weights[chunk % per_unit] / weights.sum())
