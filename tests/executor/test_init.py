"""Initial weights: the same model in every layout."""

from __future__ import annotations

import pytest
import torch
from cases import TINY, TINY_MODEL

from resihp.executor.init import initial_parameters
from resihp.executor.layouts import local_shard

NAMES = TINY_MODEL.tensors(0, 3)


@pytest.mark.parametrize(("degree", "partition"), [(1, [(0, 1), (2, 3)]), (2, [(0, 3)])])
def test_every_layout_starts_from_the_same_model(degree, partition):
    """Shards of any TP degree and any layers are those of the whole tensors, bit by bit."""
    for first, last in partition:
        for index in range(degree):
            names = TINY_MODEL.tensors(first, last)
            held = initial_parameters(TINY_MODEL, names, seed=5, degree=degree, index=index)
            for name in names:
                whole = TINY_MODEL.initial(name, seed=5)
                assert torch.equal(
                    held[name], local_shard(TINY_MODEL.layout(name), whole, degree, index)
                )


def test_tensors_and_seeds_are_unrelated():
    """Two layers, and two seeds, have different weights; norms are ones."""
    first = initial_parameters(TINY_MODEL, NAMES, seed=0)
    second = initial_parameters(TINY_MODEL, NAMES, seed=1)
    for name in NAMES:
        if name.endswith("norm.weight"):
            assert torch.equal(first[name], torch.ones(TINY.hidden_size))
        else:
            assert not torch.equal(first[name], second[name])
    up = [first[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in range(4)]
    assert not any(torch.equal(up[0], other) for other in up[1:])


def test_weights_have_the_configured_spread():
    """Mean zero and the configured standard deviation, within sampling error."""
    weight = TINY_MODEL.initial("lm_head.weight", seed=0)
    assert float(weight.mean()) == pytest.approx(0.0, abs=0.005)
    assert float(weight.std()) == pytest.approx(TINY.initializer_range, rel=0.05)


def test_drawing_leaves_the_global_generator_alone():
    """No rank's own random numbers move when it builds a model."""
    state = torch.get_rng_state()
    TINY_MODEL.initial("lm_head.weight", seed=0)
    assert torch.equal(torch.get_rng_state(), state)
