"""Small real cases: a tiny model, packed text, pipelines of stages, TP groups of threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

import torch

from resihp.config import ModelConfig
from resihp.executor.data import Dataset, load_dataset
from resihp.executor.init import initial_parameters
from resihp.executor.models import build_model
from resihp.executor.packing import MicroBatch, Packing
from resihp.executor.tp import SingleMember

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from resihp.executor.model import Stage
    from resihp.executor.tp import TensorParallel

T = TypeVar("T")
Layers = tuple[int, int]

TINY = ModelConfig(
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=56,
    vocab_size=272,
    initializer_range=0.1,
)
TINY_MODEL = build_model(TINY)
WHOLE: Sequence[Layers] = [(0, 3)]
LOSS_SCALE = 1.0 / 100.0


def dataset_of(directory: Path, documents: Sequence[bytes]) -> Dataset:
    """The documents, written as files and read back in their order."""
    for number, document in enumerate(documents):
        (directory / f"{number:04}.txt").write_bytes(document)
    return load_dataset(str(directory))


def text_batches(directory: Path, count: int, num_tokens: int = 64) -> list[MicroBatch]:
    """Windows over documents of mixed lengths: some with one segment, some with many."""
    texts = [bytes(33 + (7 * n + i * i) % 90 for i in range(n)) for n in (5, 40, 0, 17, 90, 150, 3)]
    packing = Packing(dataset_of(directory, texts * 3), num_tokens, seed=0)
    return [packing.micro_batch(sample_id) for sample_id in range(count)]


def parameters_of(
    first: int = 0, last: int = TINY.num_hidden_layers - 1, degree: int = 1, index: int = 0
) -> dict[str, Tensor]:
    names = TINY_MODEL.tensors(first, last)
    return initial_parameters(TINY_MODEL, names, seed=1, degree=degree, index=index)


def stage_of(first: int, last: int, tp: TensorParallel | None = None) -> Stage:
    tp = tp or SingleMember()
    return TINY_MODEL.stage(first, last, tp, parameters_of(first, last, tp.degree, tp.index))


def stages_of(partition: Sequence[Layers], tp: TensorParallel | None = None) -> list[Stage]:
    return [stage_of(first, last, tp) for first, last in partition]


def forward(stages: Sequence[Stage], key: tuple[int, int], batch: MicroBatch) -> None:
    x_TD = None
    for stage in stages:
        x_TD = stage.forward(key, batch, x_TD, loss_scale=LOSS_SCALE)
    assert x_TD is None


def backward_input(stages: Sequence[Stage], key: tuple[int, int]) -> None:
    dy_TD = None
    for stage in reversed(stages):
        dy_TD = stage.backward_input(key, dy_TD)
    assert dy_TD is None


def backward_weight(stages: Sequence[Stage], key: tuple[int, int]) -> dict[str, Tensor]:
    grads: dict[str, Tensor] = {}
    for stage in stages:
        grads |= stage.backward_weight(key)
    return grads


def run(stages: Sequence[Stage], batch: MicroBatch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one micro-batch through the whole pipeline."""
    forward(stages, (0, 0), batch)
    backward_input(stages, (0, 0))
    return float(stages[-1].loss_of((0, 0))), backward_weight(stages, (0, 0))


class _Member:
    def __init__(self, group: ThreadGroup, index: int) -> None:
        self.degree = group.degree
        self.index = index
        self._group = group

    def all_reduce_(self, tensor: Tensor) -> None:
        self._group.all_reduce_(self.index, tensor)


class ThreadGroup:
    """A TP group whose members are threads of this process."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._barrier = threading.Barrier(degree, timeout=30)
        self._parts: list[Tensor] = [torch.empty(0)] * degree

    def all_reduce_(self, index: int, tensor: Tensor) -> None:
        self._parts[index] = tensor.clone()
        self._barrier.wait()
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait()
        tensor.copy_(total)

    def run(self, work: Callable[[TensorParallel], T]) -> list[T]:
        """`work` on every member at once; the first failure is raised."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def member(index: int) -> None:
            try:
                results[index] = work(_Member(self, index))
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=member, args=(i,)) for i in range(self.degree)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[index] for index in range(self.degree)]


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different, f"other bits in {different}"
