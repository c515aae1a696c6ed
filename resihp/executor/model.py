"""What the runtime asks of a model: its tensors and how they are cut, and stages that compute.

Everything that moves, adds up, checks or saves state knows a model by this protocol alone, so any
model that speaks it runs in any plan. `resihp.executor.models` makes one from a job file.

Shapes: T tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from resihp.executor.layouts import local_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from resihp.executor.layouts import TensorLayout
    from resihp.executor.packing import MicroBatch
    from resihp.executor.tp import TensorParallel
    from resihp.ir.model import LayerRange
    from resihp.ir.program import Program

__all__ = [
    "DEFAULT_OPTIONS",
    "Key",
    "Model",
    "Stage",
    "StageOptions",
    "check_parameters",
    "shapes_of",
    "tensors_of",
]

Key = tuple[int, int]
"""A micro-batch by its logical home replica and its number there."""


class StageOptions(NamedTuple):
    """How a stage computes; none of it changes what it computes."""

    recompute: bool = False
    """Keep only the stage's input from F to B, and run its forward again in B."""
    attention: str = "documents"
    """Which form of block-diagonal attention."""


DEFAULT_OPTIONS = StageOptions()


class Stage(Protocol):
    """One pipeline stage on one member of its TP group: F, B and W of its micro-batches.

    All methods run on one thread. A key used out of the order F, B, W is a bug of the caller.
    """

    @property
    def has_embedding(self) -> bool:
        """Whether it is the first stage, which reads tokens."""
        ...

    @property
    def has_head(self) -> bool:
        """Whether it is the last stage, which computes the loss."""
        ...

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """This member's shards, by name; the optimizer changes them in place."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no micro-batch is between its F and its W."""
        ...

    def forward(
        self, key: Key, batch: MicroBatch, x_TD: Tensor | None, *, loss_scale: float
    ) -> Tensor | None:
        """F: the activation for the next stage, detached and contiguous, or None on the last.

        `x_TD` is None exactly on the first stage; the stage keeps it, unchanged, until W. On the
        last stage backward differentiates the summed cross-entropy times `loss_scale`, which is
        one over the number of targets of the global batch.
        """
        ...

    def backward_input(self, key: Key, dy_TD: Tensor | None) -> Tensor | None:
        """B: the gradient for the previous stage, or None on the first.

        `dy_TD` is the gradient of this stage's output, None exactly on the last stage; it is
        kept, unchanged, until W.
        """
        ...

    def backward_weight(self, key: Key) -> dict[str, Tensor]:
        """W: this micro-batch's gradient of every parameter, of its local shape.

        The tensors are new and the caller's to keep or change. Where TP members hold copies of a
        unit (`layouts.num_copies`) the gradient of a copy is this member's part of it.
        """
        ...

    def add_weight_gradients(self, key: Key, sums: Mapping[str, Tensor]) -> None:
        """W, added to `sums` (fp32, of every parameter's local shape) instead of made anew.

        It saves a pass over the weights; the additions may be rounded otherwise than those of
        `backward_weight`'s tensors.
        """
        ...

    def loss_of(self, key: Key) -> Tensor:
        """Summed cross-entropy of a forwarded micro-batch, unscaled, added in fp64; on the device.

        Last stage only. It is known from F until the key is forwarded anew or all is discarded.
        """
        ...

    def discard_all(self) -> None:
        """Drop everything of every micro-batch, as after an aborted iteration."""
        ...


class Model(Protocol):
    """A decoder as named logical tensors, each in one layer, and a maker of its stages.

    A logical tensor is whole, as in a checkpoint. Names are unique over the model.
    """

    @property
    def num_layers(self) -> int:
        """Layers that a plan may cut the pipeline between."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width D of what crosses stages."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    @property
    def tied(self) -> tuple[tuple[str, str], ...]:
        """Pairs (input side, output side) of equal tensors.

        They start equal (`initial`) and stay so: STEP gives both the sum of their two gradients,
        input side first.
        """
        ...

    def tensors(self, first: int, last: int) -> list[str]:
        """Tensors of layers `first .. last` inclusive, in model order.

        The embedding goes with layer 0, the final norm and the head with the last layer.
        """
        ...

    def layer_of(self, name: str) -> int:
        """The layer that the tensor moves with."""
        ...

    def layout(self, name: str) -> TensorLayout:
        """Shape of the whole tensor, and where TP cuts it."""
        ...

    def initial(self, name: str, seed: int) -> Tensor:
        """The whole untrained tensor, fp32 on CPU; depends on the seed and the name only."""
        ...

    def stage(
        self,
        first: int,
        last: int,
        tp: TensorParallel,
        parameters: Mapping[str, Tensor],
        options: StageOptions = DEFAULT_OPTIONS,
    ) -> Stage:
        """The stage of layers `first .. last` on member `tp.index`, whose shards `parameters` are.

        It computes where they lie. `check_parameters` looks whether they are all there.
        """
        ...


def check_parameters(
    model: Model, first: int, last: int, tp: TensorParallel, parameters: Mapping[str, Tensor]
) -> None:
    """Assert that `parameters` are what `Model.stage` asks for: all of them, of their shapes."""
    names = model.tensors(first, last)
    assert set(names) == set(parameters), "parameters are not those of the layers"
    for name in names:
        shape = local_shape(model.layout(name), tp.degree, tp.index)
        assert parameters[name].shape == shape, f"{name}: not of shape {shape}"


def tensors_of(model: Model, layers: Iterable[LayerRange]) -> list[str]:
    """Tensors of all stages of a rank, stage by stage."""
    return [name for first, last in layers for name in model.tensors(first, last)]


def shapes_of(model: Model, program: Program) -> dict[str, tuple[int, ...]]:
    """What the rank of `program` holds: its shards by name, stage by stage, with their shapes."""
    return {
        name: local_shape(model.layout(name), program.tp, program.tp_index)
        for name in tensors_of(model, program.layers)
    }
