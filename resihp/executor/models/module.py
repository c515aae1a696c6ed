"""Bring your own stage: plain nn.Modules as a model that plans can cut, move and rebuild.

A model is an embedding, layers and a head, each a `Piece`: how to build the module, and how to
call it on one micro-batch. Nothing is asked of the modules themselves. What plans need comes from
here: names, layouts, initial weights that depend on a piece's name only, and the split of the
backward into B and W (`executor.deferred`).

A plain module knows nothing of tensor parallelism, so its tensors are replicated: at a TP degree
above 1 every member of the group computes the whole stage.

Shapes: T tokens of a micro-batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from resihp.errors import ConfigError
from resihp.executor.keyed_random import keyed_seed
from resihp.executor.layouts import TensorLayout
from resihp.executor.model import DEFAULT_OPTIONS, Stage, StageOptions, check_parameters
from resihp.executor.models.module_stage import EMBEDDING, HEAD, ModuleStage, Piece, build, trained
from resihp.executor.tp import TensorParallel

__all__ = ["ModuleModel", "Piece"]


class ModuleModel:
    """A `Model` (see `executor.model`) of plain modules; layer i is `layers[i]`.

    `tied` pairs a parameter's name on the input side with one on the output side, such as
    ("embedding.weight", "head.weight"). Where the pieces draw random numbers in their forward
    (dropout), say `stochastic`: numbers are then keyed by sample and piece, so that a micro-batch
    that is run again, elsewhere, gets the same ones.
    """

    def __init__(
        self,
        embedding: Piece,
        layers: Sequence[Piece],
        head: Piece,
        *,
        hidden_size: int,
        vocab_size: int,
        tied: Sequence[tuple[str, str]] = (),
        stochastic: bool = False,
    ) -> None:
        self._pieces = {EMBEDDING: embedding, HEAD: head}
        self._pieces |= {f"layers.{number}": piece for number, piece in enumerate(layers)}
        self.num_layers = len(layers)
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.tied = tuple(tied)
        self.stochastic = stochastic
        self._layouts: dict[str, dict[str, TensorLayout]] = {}
        self._drawn: tuple[str, int, dict[str, Tensor]] | None = None
        for names in self.tied:
            for name in names:
                if self.layer_of(name) not in (0, self.num_layers - 1):
                    raise ConfigError(f"{name} cannot be tied: only the two ends of a model can")
                self.layout(name)

    def tensors(self, first: int, last: int) -> list[str]:
        """Names of the parameters to train of layers `first .. last`, in model order."""
        return [name for piece in self._run(first, last) for name in self._shapes(piece)]

    def layer_of(self, name: str) -> int:
        """The layer that the tensor moves with."""
        piece = self._piece_of(name)
        if piece == EMBEDDING:
            return 0
        return self.num_layers - 1 if piece == HEAD else int(piece.split(".")[1])

    def layout(self, name: str) -> TensorLayout:
        """Replicated, whatever the tensor is."""
        shapes = self._shapes(self._piece_of(name))
        if name not in shapes:
            raise ConfigError(f"no parameter is called {name}; there are {', '.join(shapes)}")
        return shapes[name]

    def initial(self, name: str, seed: int) -> Tensor:
        """What the piece's own initialisation gives under a seed of its name, in fp32.

        The output side of a tied pair begins as its input side.
        """
        source = {output: source for source, output in self.tied}.get(name, name)
        piece = self._piece_of(source)
        if self._drawn is None or self._drawn[:2] != (piece, seed):
            module = build(self._pieces[piece], keyed_seed("init", seed, piece))
            drawn = {f"{piece}.{n}": p.detach().float() for n, p in trained(module)}
            self._drawn = piece, seed, drawn
        return self._drawn[2][source].clone()

    def stage(
        self,
        first: int,
        last: int,
        tp: TensorParallel,
        parameters: Mapping[str, Tensor],
        options: StageOptions = DEFAULT_OPTIONS,
    ) -> Stage:
        """See `Model`."""
        names = self.tensors(first, last)
        check_parameters(self, first, last, tp, parameters)
        pieces = {name: self._pieces[name] for name in self._run(first, last)}
        return ModuleStage(
            pieces,
            {name: parameters[name] for name in names},
            recompute=options.recompute,
            stochastic=self.stochastic,
        )

    def _run(self, first: int, last: int) -> list[str]:
        """Names of the pieces of a run of layers."""
        names = [EMBEDDING] if first == 0 else []
        names += [f"layers.{number}" for number in range(first, last + 1)]
        return [*names, HEAD] if last == self.num_layers - 1 else names

    def _piece_of(self, name: str) -> str:
        parts = name.split(".")
        piece = ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
        if piece not in self._pieces:
            raise ConfigError(f"no piece of the model holds {name}")
        return piece

    def _shapes(self, piece: str) -> dict[str, TensorLayout]:
        if piece not in self._layouts:
            module = build(self._pieces[piece], 0)
            self._layouts[piece] = {
                f"{piece}.{name}": TensorLayout(tuple(parameter.shape), None, 1)
                for name, parameter in trained(module)
            }
        return self._layouts[piece]
