"""Names, shapes, and chunks that carry a tensor from one TP layout to another."""

from __future__ import annotations

import pytest
import torch
from cases import TINY
from hypothesis import given
from hypothesis import strategies as st

from resihp.executor.llama import head_dim
from resihp.executor.shards import (
    holds,
    layer_of,
    local_shape,
    local_shard,
    logical_shape,
    shard_dim,
    slice_of,
    tensor_names,
)

ALL_NAMES = tensor_names(TINY, 0, 3)
NAMES = st.sampled_from(ALL_NAMES)
POWERS = st.sampled_from([1, 2, 4])


def numbered(name: str) -> torch.Tensor:
    """The whole tensor with a different number in every place."""
    shape = logical_shape(TINY, name)
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def test_names_are_those_of_the_checkpoint():
    """Hugging Face's names, the embedding first, the final norm and the head last."""
    assert ALL_NAMES[0] == "model.embed_tokens.weight"
    assert ALL_NAMES[1:10] == [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ]
    assert ALL_NAMES[-2:] == ["model.norm.weight", "lm_head.weight"]


def test_every_tensor_belongs_to_one_layer():
    """Cutting the layers anywhere cuts the names into the same parts."""
    for cut in range(3):
        assert tensor_names(TINY, 0, cut) + tensor_names(TINY, cut + 1, 3) == ALL_NAMES
    for first, last in ((0, 0), (1, 2), (3, 3)):
        held = [name for name in ALL_NAMES if first <= layer_of(TINY, name) <= last]
        assert held == tensor_names(TINY, first, last)


@given(NAMES, POWERS)
def test_shards_have_the_shape_they_should(name, degree):
    """A shard is the whole tensor cut along its shard dim, if it has one."""
    for index in range(degree):
        shard = local_shard(name, numbered(name), degree, index)
        assert shard.shape == local_shape(TINY, name, degree)
        assert shard.is_contiguous()


@pytest.mark.parametrize(("part", "num_heads"), [("q", 4), ("k", 2), ("v", 2)])
def test_members_hold_whole_heads(part, num_heads):
    """Member i of 2 has the i-th half of the heads, so its keys serve its own queries."""
    name = f"model.layers.1.self_attn.{part}_proj.weight"
    heads = numbered(name).reshape(num_heads, head_dim(TINY), -1)
    for index in range(2):
        mine = heads[index * num_heads // 2 : (index + 1) * num_heads // 2]
        assert torch.equal(local_shard(name, numbered(name), 2, index), mine.flatten(0, 1))


@given(NAMES, POWERS, POWERS, st.sampled_from([1, 2]))
def test_chunks_carry_a_tensor_between_layouts(name, sender, receiver, finer):
    """Whole, cut at one degree, sent in chunks, put together at another: as if cut directly."""
    num_chunks = max(sender, receiver) * finer
    full = numbered(name)
    sources = [local_shard(name, full, sender, i) for i in range(sender)]
    for index in range(receiver):
        target = torch.full(local_shape(TINY, name, receiver), float("nan"))
        for chunk in range(num_chunks):
            if not holds(name, chunk, num_chunks, receiver, index):
                continue
            holder = next(i for i in range(sender) if holds(name, chunk, num_chunks, sender, i))
            sent = slice_of(name, sources[holder], chunk, num_chunks, sender, holder)
            slice_of(name, target, chunk, num_chunks, receiver, index).copy_(sent)
        assert torch.equal(target, local_shard(name, full, receiver, index))


@given(NAMES, st.sampled_from([1, 2, 4, 8]))
def test_chunks_cover_every_element_once(name, num_chunks):
    """Also of a replicated tensor, whose rows need not divide evenly."""
    touched = torch.zeros(logical_shape(TINY, name))
    for chunk in range(num_chunks):
        slice_of(name, touched, chunk, num_chunks).add_(1)
    assert (touched == 1).all()


@given(NAMES, POWERS)
def test_one_member_holds_a_chunk_unless_it_is_replicated(name, degree):
    """A sharded chunk has one source in a group; any member can give a replicated one."""
    for chunk in range(4):
        holders = [i for i in range(degree) if holds(name, chunk, 4, degree, i)]
        assert holders == (
            list(range(degree)) if shard_dim(name) is None else [chunk * degree // 4]
        )


def test_a_replicated_tensor_of_odd_size_is_cut_too():
    """Near-equal runs of rows, none lost."""
    norm = torch.arange(7.0)
    runs = [slice_of("model.norm.weight", norm, chunk, 4, 2, 1).tolist() for chunk in range(4)]
    assert runs == [[0.0], [1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_a_chunk_that_is_not_there_is_caught():
    """Asking a member for another's chunk is our bug."""
    name = "model.layers.0.mlp.up_proj.weight"
    shard = local_shard(name, numbered(name), 2, 0)
    with pytest.raises(AssertionError, match="not on member"):
        slice_of(name, shard, 3, 4, 2, 0)
