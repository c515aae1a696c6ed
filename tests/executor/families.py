"""Small models of every family, with weights that leave nothing at zero or one."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from cases import Layers, ThreadGroup, run
from hypothesis import strategies as st

from resihp.config import ModelConfig, RopeScaling
from resihp.executor.keyed_random import keyed_seed
from resihp.executor.layouts import local_shard, shard_units
from resihp.executor.model import DEFAULT_OPTIONS, StageOptions
from resihp.executor.packing import IGNORED_TARGET, MicroBatch
from resihp.executor.tp import SingleMember

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from resihp.executor.model import Model, Stage
    from resihp.executor.tp import TensorParallel


def _model(**changed: object) -> ModelConfig:
    """A vocabulary and a feed-forward that no power of two divides."""
    fields: dict[str, object] = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 45,
        "vocab_size": 275,
        "initializer_range": 0.15,
    }
    return ModelConfig(**(fields | changed))  # pyright: ignore[reportArgumentType]


FAMILIES: dict[str, ModelConfig] = {
    "llama": _model(),
    "llama with one key-value head and biases": _model(
        num_key_value_heads=1,
        attention_bias=True,
        rope_scaling=RopeScaling(
            rope_type="llama3", factor=8.0, original_max_position_embeddings=16
        ),
    ),
    "qwen2": _model(model_type="qwen2", num_key_value_heads=4, rope_theta=1e6),
    "qwen2 tied and stretched": _model(
        model_type="qwen2",
        tie_word_embeddings=True,
        rope_scaling=RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "llama tied and stretched": _model(
        tie_word_embeddings=True,
        rope_scaling=RopeScaling(rope_type="linear", factor=2.0),
    ),
}


@st.composite
def models_and_degrees(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    """Any small model with a TP degree that it can have."""
    degree = draw(st.sampled_from([1, 2, 4, 8]))
    heads = degree * draw(st.integers(1, 3))
    kv_heads = draw(
        st.sampled_from(
            [
                number
                for number in range(1, heads + 1)
                if heads % number == 0 and (number % degree == 0 or degree % number == 0)
            ]
        )
    )
    scaling = st.builds(
        RopeScaling,
        rope_type=st.sampled_from(["default", "linear", "llama3", "yarn"]),
        factor=st.sampled_from([1.0, 2.0, 8.0]),
        original_max_position_embeddings=st.sampled_from([8, 64]),
    )
    config = _model(
        hidden_size=heads * draw(st.sampled_from([2, 4, 6])),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=draw(st.integers(degree, 40)),
        vocab_size=draw(st.integers(258, 280)),
        rope_scaling=draw(st.none() | scaling),
        tie_word_embeddings=draw(st.booleans()),
        **draw(st.sampled_from([{}, {"attention_bias": True}, {"model_type": "qwen2"}])),
    )
    return config, degree


@st.composite
def windows(draw: st.DrawFn, num_rows: int) -> MicroBatch:
    """Any micro-batch of a vocabulary: segments of any lengths, targets missing anywhere."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    count = sum(lengths)
    ids = draw(st.lists(st.integers(0, num_rows - 1), min_size=count, max_size=count))
    targets = draw(
        st.lists(
            st.just(IGNORED_TARGET) | st.integers(0, num_rows - 1), min_size=count, max_size=count
        )
    )
    return MicroBatch(
        sample_id=0,
        input_ids_T=torch.tensor(ids),
        targets_T=torch.tensor(targets),
        position_ids_T=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=(0, *accumulate(lengths)),
        num_targets=sum(target != IGNORED_TARGET for target in targets),
    )


def whole_parameters(model: Model, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Initial tensors with noise on norms and biases; tied ones stay equal."""
    parameters: dict[str, Tensor] = {}
    for name in model.tensors(0, model.num_layers - 1):
        tensor = model.initial(name, seed=3)
        if tensor.dim() == 1:
            generator = torch.Generator().manual_seed(keyed_seed("noise", 0, name))
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
        parameters[name] = tensor.to(dtype)
    return parameters


def stages_over(
    model: Model,
    parameters: Mapping[str, Tensor],
    partition: Sequence[Layers],
    tp: TensorParallel | None = None,
    options: StageOptions = DEFAULT_OPTIONS,
) -> list[Stage]:
    """A pipeline of one TP member's stages over its shards of the whole `parameters`."""
    tp = tp or SingleMember()
    return [
        model.stage(
            first,
            last,
            tp,
            {
                name: local_shard(model.layout(name), parameters[name], tp.degree, tp.index)
                for name in model.tensors(first, last)
            },
            options,
        )
        for first, last in partition
    ]


def run_group(
    model: Model,
    parameters: Mapping[str, Tensor],
    partition: Sequence[Layers],
    batch: MicroBatch,
    degree: int,
    options: StageOptions = DEFAULT_OPTIONS,
) -> tuple[float, dict[str, Tensor]]:
    """Loss, which all members must agree on, and whole gradients from a TP group's shards."""
    results = ThreadGroup(degree).run(
        lambda tp: run(stages_over(model, parameters, partition, tp, options), batch)
    )
    losses = {loss for loss, _ in results}
    assert len(losses) == 1, f"members report {losses}"
    return losses.pop(), assembled(model, [grads for _, grads in results])


def assembled(model: Model, members: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors from the gradients of all members; parts of copies are added."""
    whole: dict[str, Tensor] = {}
    for name, first in members[0].items():
        shape, dim, units = model.layout(name)
        if dim is None:
            assert all(torch.equal(grads[name], first) for grads in members), f"{name} differs"
            whole[name] = first
            continue
        total = torch.zeros(shape, dtype=first.dtype)
        length = shape[dim] // units
        for index, grads in enumerate(members):
            start, end = shard_units(units, len(members), index)
            total.narrow(dim, start * length, (end - start) * length).add_(grads[name])
        whole[name] = total
    return whole


def untied(model: Model, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What one tensor per table would get: the two gradients of a tied pair added."""
    summed = dict(grads)
    for source, output in model.tied:
        summed[source] = summed[source] + summed.pop(output)
    return summed


def relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest error of any tensor, as the norm of the difference over the norm."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[name].double() - expected[name].double()).norm() / expected[name].norm())
        for name in expected
    )
