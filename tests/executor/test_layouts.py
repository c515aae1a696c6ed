"""Cutting tensors: shards and chunks of any layout carry every element to any other."""

from __future__ import annotations

import pytest
import torch
from cases import TINY, TINY_MODEL
from hypothesis import given
from hypothesis import strategies as st

from resihp.executor.layouts import (
    TensorLayout,
    cuts_evenly,
    holds,
    local_shape,
    local_shard,
    num_copies,
    shard_units,
    slice_of,
)
from resihp.executor.llama import head_dim

DEGREES = [1, 2, 4, 8]
POWERS = st.sampled_from(DEGREES)


@st.composite
def layouts(draw: st.DrawFn) -> TensorLayout:
    """Any tensor that a group of up to eight members can hold."""
    dim = draw(st.sampled_from([None, 0, 1]))
    if dim is None:
        return TensorLayout((draw(st.integers(1, 9)), 2), None, 1)
    units = draw(st.sampled_from([1, 2, 4, 8]) | st.integers(8, 40))
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    shape[dim] *= units
    return TensorLayout(tuple(shape), dim, units)


def numbered(layout: TensorLayout) -> torch.Tensor:
    """The whole tensor with a different number in every place."""
    return torch.arange(float(torch.Size(layout.shape).numel())).reshape(layout.shape)


@given(layouts(), POWERS)
def test_shards_have_the_shape_they_should(layout: TensorLayout, degree: int):
    """A shard is a contiguous copy, and nobody else's storage."""
    whole = numbered(layout)
    for index in range(degree):
        shard = local_shard(layout, whole, degree, index)
        assert shard.shape == local_shape(layout, degree, index)
        assert shard.is_contiguous()
        assert shard.data_ptr() != whole.data_ptr()


@given(layouts(), POWERS)
def test_every_unit_has_equally_many_copies(layout: TensorLayout, degree: int):
    """One where units suffice; and no member holds more than one unit more than another."""
    if layout.dim is None:
        return
    ranges = [shard_units(layout.units, degree, index) for index in range(degree)]
    for unit in range(layout.units):
        held = sum(start <= unit < end for start, end in ranges)
        assert held == num_copies(layout, degree)
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= 1


@given(layouts(), POWERS, POWERS, st.sampled_from([1, 2]))
def test_chunks_carry_a_tensor_between_layouts(
    layout: TensorLayout, sender: int, receiver: int, finer: int
):
    """Whole, cut at one degree, sent in chunks, put together at another: as if cut directly."""
    num_chunks = min(8, max(sender, receiver) * finer)
    full = numbered(layout)
    sources = [local_shard(layout, full, sender, i) for i in range(sender)]
    for index in range(receiver):
        target = torch.full(local_shape(layout, receiver, index), float("nan"))
        for chunk in range(num_chunks):
            if not holds(layout, chunk, num_chunks, receiver, index):
                continue
            holder = next(i for i in range(sender) if holds(layout, chunk, num_chunks, sender, i))
            sent = slice_of(layout, sources[holder], chunk, num_chunks, sender, holder)
            slice_of(layout, target, chunk, num_chunks, receiver, index).copy_(sent)
        assert torch.equal(target, local_shard(layout, full, receiver, index))


@given(layouts(), POWERS)
def test_chunks_cover_every_element_equally_often(layout: TensorLayout, num_chunks: int):
    """Once, unless units are short."""
    touched = torch.zeros(layout.shape)
    for chunk in range(num_chunks if layout.dim is not None else 1):
        slice_of(layout, touched, chunk, num_chunks).add_(1)
    assert (touched == num_copies(layout, num_chunks)).all()


@given(layouts(), POWERS)
def test_one_member_holds_a_chunk_unless_it_is_replicated(layout: TensorLayout, degree: int):
    """A sharded chunk has one source in a group; any member can give a replicated tensor."""
    for chunk in range(8):
        holders = [i for i in range(degree) if holds(layout, chunk, 8, degree, i)]
        assert holders == (list(range(degree)) if layout.dim is None else [chunk * degree // 8])


def test_runs_are_near_equal_where_units_do_not_divide():
    """Rows of a vocabulary over four members, and over two that hold the same chunks."""
    table = TensorLayout((11, 1), 0, 11)
    assert [shard_units(11, 4, index) for index in range(4)] == [(0, 2), (2, 5), (5, 8), (8, 11)]
    second = local_shard(table, numbered(table), 2, 1)
    assert slice_of(table, second, 2, 4, 2, 1).flatten().tolist() == [5, 6, 7]


def test_members_beyond_the_heads_hold_copies():
    """Two key/value heads of three channels over four members."""
    heads = TensorLayout((6, 1), 0, 2)
    shards = [local_shard(heads, numbered(heads), 4, index).flatten() for index in range(4)]
    assert [shard.tolist() for shard in shards] == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]


@pytest.mark.parametrize(("units", "degree", "fits"), [(3, 2, True), (3, 4, False), (2, 8, True)])
def test_copies_need_units_that_divide_the_members(units: int, degree: int, fits: bool):
    """Three heads have no equal number of copies among four members."""
    assert cuts_evenly(TensorLayout((units,), 0, units), degree) == fits


def test_a_chunk_that_is_not_there_is_caught():
    """Asking a member for another's chunk is our bug."""
    layout = TensorLayout((8, 2), 0, 8)
    with pytest.raises(AssertionError, match="not on member"):
        slice_of(layout, local_shard(layout, numbered(layout), 2, 0), 3, 4, 2, 0)


# --- the layouts of the model


def test_names_are_those_of_the_checkpoint():
    """Hugging Face's names, the embedding first, the final norm and the head last."""
    names = TINY_MODEL.tensors(0, 3)
    assert names[0] == "model.embed_tokens.weight"
    assert names[1:10] == [
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
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]


def test_every_tensor_belongs_to_one_layer():
    """Cutting the layers anywhere cuts the names into the same parts."""
    names = TINY_MODEL.tensors(0, 3)
    for cut in range(3):
        assert TINY_MODEL.tensors(0, cut) + TINY_MODEL.tensors(cut + 1, 3) == names
    for first, last in ((0, 0), (1, 2), (3, 3)):
        held = [name for name in names if first <= TINY_MODEL.layer_of(name) <= last]
        assert held == TINY_MODEL.tensors(first, last)


@pytest.mark.parametrize(("part", "num_heads"), [("q", 4), ("k", 2), ("v", 2)])
def test_members_hold_whole_heads(part: str, num_heads: int):
    """Member i of 2 has the i-th half of the heads, so its keys serve its own queries."""
    layout = TINY_MODEL.layout(f"model.layers.1.self_attn.{part}_proj.weight")
    heads = numbered(layout).reshape(num_heads, head_dim(TINY), -1)
    for index in range(2):
        mine = heads[index * num_heads // 2 : (index + 1) * num_heads // 2]
        assert torch.equal(local_shard(layout, numbered(layout), 2, index), mine.flatten(0, 1))
