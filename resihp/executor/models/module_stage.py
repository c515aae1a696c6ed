"""The stage of plain nn.Modules: F, B and W of modules in a row.

Shapes: T tokens of a micro-batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from resihp.errors import ConfigError
from resihp.executor.deferred import CurrentStore, defer_weight_gradients
from resihp.executor.function import backward_on_this_thread
from resihp.executor.keyed_random import keyed_seed
from resihp.executor.model import Key
from resihp.executor.packing import IGNORED_TARGET, MicroBatch
from resihp.executor.precision import wide
from resihp.executor.weight_grads import WeightGradStore

__all__ = ["EMBEDDING", "HEAD", "ModuleStage", "Piece", "build", "trained"]

EMBEDDING = "embedding"
HEAD = "head"

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_RANDOM = threading.Lock()
"""Torch's default generator belongs to the process; ranks may share one."""


class Piece(NamedTuple):
    """A part of the model, to be built on whichever rank runs it.

    `call` gets the module and the micro-batch: an embedding gives x_TD, a layer turns x_TD into
    x_TD, the head gives logits_TV.
    """

    build: Callable[[], nn.Module]
    call: Callable[..., Tensor]


def build(piece: Piece, seed: int) -> nn.Module:
    """The module, drawn under a seed of its own; the process's generator is as before."""
    with _seeded(seed):
        return piece.build()


@contextmanager
def _seeded(seed: int) -> Generator[None]:
    """Random numbers of this block depend on `seed` only."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    random = cast("Any", torch.random)  # untyped
    with _RANDOM, random.fork_rng(devices=devices):
        random.manual_seed(seed)
        yield


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters to train, each once, under its first name."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


class _Call(NamedTuple):
    name: str
    call: Callable[..., Tensor]
    module: nn.Module


class _Span(NamedTuple):
    """Calls in a row whose forward B runs again together, or that keep one graph."""

    calls: Sequence[_Call]
    is_last: bool
    """Of the whole model: its output are logits."""


class _Kept(NamedTuple):
    """What F leaves of a span: its input, and its output with the graph unless B makes it anew."""

    input_TD: Tensor | None
    """A leaf; None where the span begins with the embedding."""
    output: Tensor | None


class _Forwarded(NamedTuple):
    """What F leaves for B."""

    batch: MicroBatch
    spans: list[_Kept]
    loss_scale: float
    store: WeightGradStore


class ModuleStage:
    """A `Stage` of plain modules in a row.

    Buffers and frozen parameters are constants: they come from the piece's own `build`, on every
    rank anew, and a forward that changes a buffer is refused (ConfigError).
    """

    def __init__(
        self,
        pieces: Mapping[str, Piece],
        parameters: Mapping[str, Tensor],
        *,
        recompute: bool,
        stochastic: bool,
    ) -> None:
        self.parameters = dict(parameters)
        self.has_embedding = EMBEDDING in pieces
        self.has_head = HEAD in pieces
        self._recompute = recompute
        self._stochastic = stochastic
        self._current = CurrentStore()
        self._leaves: dict[str, nn.Parameter] = {}
        calls = [
            _Call(name, piece.call, self._adopted(name, piece)) for name, piece in pieces.items()
        ]
        runs = [[call] for call in calls] if recompute else [calls]
        self._spans = [_Span(run, self.has_head and run[-1] is calls[-1]) for run in runs]
        self._buffers = [
            (f"{call.name}.{name}", buffer, buffer._version)
            for call in calls
            for name, buffer in call.module.named_buffers()
        ]
        self._forwarded: dict[Key, _Forwarded] = {}
        self._awaiting: dict[Key, tuple[WeightGradStore, dict[str, Tensor]]] = {}
        self._losses: dict[Key, Tensor] = {}

    def _adopted(self, name: str, piece: Piece) -> nn.Module:
        """The module, computing with our tensors, with its weight gradients deferred."""
        module = build(piece, keyed_seed("init", 0, name))
        if not self._stochastic and any(_draws(inner) for inner in module.modules()):
            raise ConfigError(
                f"{name} draws random numbers (dropout): say stochastic=True, or set it to 0"
            )
        module.to(next((p.device for p in self.parameters.values()), torch.device("cpu")))
        names: dict[Tensor, str] = {}
        for inner, parameter in trained(module):
            full = f"{name}.{inner}"
            # One storage: the update of the state is the update of the module.
            parameter.data = self.parameters[full]
            self._leaves[full], names[parameter] = parameter, full
        defer_weight_gradients(module, names, self._current)
        return module

    @property
    def is_idle(self) -> bool:
        """Whether no micro-batch is between its F and its W."""
        return not self._forwarded and not self._awaiting

    def forward(
        self, key: Key, batch: MicroBatch, x_TD: Tensor | None, *, loss_scale: float
    ) -> Tensor | None:
        """F: the activation for the next stage, detached and contiguous, or None on the last."""
        assert key not in self._forwarded, f"{key}: forwarded twice"
        assert key not in self._awaiting, f"{key}: forwarded before its W"
        assert (x_TD is None) == self.has_embedding, f"{key}: wrong kind of input"
        store = WeightGradStore()
        spans: list[_Kept] = []
        with self._pushing_to(store):
            for span in self._spans:
                input_TD = None if x_TD is None else x_TD.detach().requires_grad_()
                with torch.set_grad_enabled(not self._recompute):
                    output = self._output(span, batch, input_TD)
                spans.append(_Kept(input_TD, None if self._recompute else output))
                x_TD = output.detach()
        self._check_buffers()
        self._forwarded[key] = _Forwarded(batch, spans, loss_scale, store)
        assert x_TD is not None
        if not self.has_head:
            return x_TD.contiguous()
        self._losses[key] = x_TD.double().sum()
        return None

    def loss_of(self, key: Key) -> Tensor:
        """Summed cross-entropy of a forwarded micro-batch, unscaled, added in fp64."""
        return self._losses[key]

    def backward_input(self, key: Key, dy_TD: Tensor | None) -> Tensor | None:
        """B: the gradient for the previous stage, or None on the first.

        Leaves take their gradients here, and W hands them out.
        """
        assert (dy_TD is None) == self.has_head, f"{key}: wrong kind of output gradient"
        done = self._forwarded.pop(key)
        dx_TD = dy_TD
        with self._pushing_to(done.store):
            for span in reversed(self._spans):
                dx_TD = self._backward(span, done.spans.pop(), done, dx_TD)
        self._awaiting[key] = done.store, self._take_leaf_grads()
        return dx_TD

    def _backward(
        self, span: _Span, kept: _Kept, done: _Forwarded, dy_TD: Tensor | None
    ) -> Tensor | None:
        """One span's B: the gradient of its input, None where that are tokens."""
        input_TD, output = kept
        if output is None:
            with torch.enable_grad():
                output = self._output(span, done.batch, input_TD)
        doutput = torch.full_like(output, done.loss_scale) if dy_TD is None else dy_TD
        # Not `grad`: a reentrant checkpoint inside allows only `backward`.
        with backward_on_this_thread():
            torch.autograd.backward((output,), (doutput,))
        if input_TD is None:
            return None
        dx_TD, input_TD.grad = input_TD.grad, None
        return torch.zeros_like(input_TD) if dx_TD is None else dx_TD.contiguous()

    def backward_weight(self, key: Key) -> dict[str, Tensor]:
        """W: this micro-batch's gradient of every parameter; zeros where the output has none."""
        store, leaf_grads = self._awaiting.pop(key)
        grads = store.compute()
        for name, leaf_grad in leaf_grads.items():
            grad = wide(leaf_grad)
            grads[name] = grads[name] + grad if name in grads else grad
        return {
            name: grads[name] if name in grads else torch.zeros_like(wide(parameter))
            for name, parameter in self.parameters.items()
        }

    def add_weight_gradients(self, key: Key, sums: Mapping[str, Tensor]) -> None:
        """W, added to `sums`, which hold fp32 of every parameter."""
        store, leaf_grads = self._awaiting.pop(key)
        store.add_to(sums)
        for name, leaf_grad in leaf_grads.items():
            sums[name].add_(leaf_grad)

    def discard_all(self) -> None:
        """Drop everything of every micro-batch, as after an aborted iteration."""
        self._forwarded.clear()
        self._awaiting.clear()
        self._losses.clear()
        self._take_leaf_grads()

    def _output(self, span: _Span, batch: MicroBatch, x_TD: Tensor | None) -> Tensor:
        """A span's activation, or the losses per token where it is the last of the model."""
        for name, call, module in span.calls:
            seed = keyed_seed("forward", batch.sample_id, name) if self._stochastic else None
            with nullcontext() if seed is None else _seeded(seed):
                x_TD = call(module, batch) if x_TD is None else call(module, x_TD, batch)
        assert x_TD is not None
        if not span.is_last:
            return x_TD
        return nnf.cross_entropy(
            x_TD.float(), batch.targets_T, ignore_index=IGNORED_TARGET, reduction="none"
        )

    @contextmanager
    def _pushing_to(self, store: WeightGradStore) -> Generator[None]:
        self._current.store = store
        try:
            yield
        finally:
            self._current.store = None

    def _take_leaf_grads(self) -> dict[str, Tensor]:
        """What autograd has added to the leaves since the last call; they are empty again."""
        taken: dict[str, Tensor] = {}
        for name, leaf in self._leaves.items():
            if leaf.grad is not None:
                taken[name], leaf.grad = leaf.grad, None
        return taken

    def _check_buffers(self) -> None:
        for name, buffer, version in self._buffers:
            if buffer._version != version:
                raise ConfigError(
                    f"the forward changed the buffer {name}: only parameters are state that "
                    "survives a failure; use a layer without running statistics"
                )


def _draws(module: nn.Module) -> bool:
    """Whether the module is a dropout that is on."""
    return isinstance(module, _DROPOUTS) and module.p > 0 and module.training
