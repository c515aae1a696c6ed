"""Stages against plain autograd: partitions, B/W orders, tensor parallelism."""

from __future__ import annotations

import threading
from itertools import permutations

import pytest
import torch
from cases import (
    LOSS_SCALE,
    TINY,
    TINY_MODEL,
    WHOLE,
    ThreadGroup,
    assert_same_bits,
    backward_input,
    backward_weight,
    forward,
    parameters_of,
    run,
    stage_of,
    stages_of,
    text_batches,
)
from reference import loss_and_grads

from resihp.executor.layouts import local_shard
from resihp.executor.llama import FINAL_NORM
from resihp.executor.model import StageOptions
from resihp.executor.tp import SingleMember

PARTITIONS = [WHOLE, [(0, 1), (2, 3)], [(0, 0), (1, 1), (2, 2), (3, 3)], [(0, 2), (3, 3)]]


@pytest.fixture
def batches(tmp_path):
    found = text_batches(tmp_path, 6)
    assert {len(batch.cu_seqlens) for batch in found} >= {2, 3}, "one and several segments"
    return found


@pytest.mark.parametrize("partition", PARTITIONS)
def test_gradients_have_the_bits_of_plain_autograd(batches, partition):
    """Deferring W and cutting the model into stages changes no bit of loss or gradients."""
    stages = stages_of(partition)
    for batch in batches:
        loss, grads = run(stages, batch)
        expected_loss, expected = loss_and_grads(TINY, parameters_of(), batch, LOSS_SCALE)
        assert loss == expected_loss
        assert_same_bits(grads, expected)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_weight_gradients_do_not_depend_on_when_w_runs(batches, order):
    """W directly after each B, and all W later in any order, give the same bits."""
    keys = [(0, 0), (0, 1), (1, 0)]
    at_once = {}
    stages = stages_of([(0, 1), (2, 3)])
    for key, batch in zip(keys, batches, strict=False):
        at_once[key] = run(stages, batch)[1]
    for key, batch in zip(keys, batches, strict=False):
        forward(stages, key, batch)
    for key in keys:
        backward_input(stages, key)
    for number in order:
        assert_same_bits(backward_weight(stages, keys[number]), at_once[keys[number]])


def test_interleaved_micro_batches_do_not_mix(batches):
    """1F1B order, with a second micro-batch forwarded before the first goes back."""
    stages = stages_of([(0, 1), (2, 3)])
    alone = [run(stages, batch)[1] for batch in batches[:3]]
    forward(stages, (0, 0), batches[0])
    forward(stages, (0, 1), batches[1])
    backward_input(stages, (0, 0))
    assert_same_bits(backward_weight(stages, (0, 0)), alone[0])
    forward(stages, (0, 2), batches[2])
    backward_input(stages, (0, 1))
    assert_same_bits(backward_weight(stages, (0, 1)), alone[1])
    backward_input(stages, (0, 2))
    assert_same_bits(backward_weight(stages, (0, 2)), alone[2])
    assert all(stage.is_idle for stage in stages)


@pytest.mark.parametrize("partition", PARTITIONS[:2])
def test_tensor_parallel_gradients_are_the_shards_of_the_whole(batches, partition):
    """At TP 2 each member gets its shard; a row-parallel sum in halves costs a few roundings."""
    for batch in batches[:3]:
        group = ThreadGroup(2)
        results = group.run(lambda tp, batch=batch: run(stages_of(partition, tp), batch))
        expected_loss, expected = loss_and_grads(TINY, parameters_of(), batch, LOSS_SCALE)
        for index, (loss, grads) in enumerate(results):
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            for name, grad in grads.items():
                shard = local_shard(TINY_MODEL.layout(name), expected[name], 2, index)
                scale = float(expected[name].abs().max())
                torch.testing.assert_close(grad, shard, rtol=1e-4, atol=2e-6 * scale)


def test_replicated_gradients_have_the_same_bits_on_all_members(batches):
    """Norms need no exchange inside a TP group."""
    results = ThreadGroup(2).run(lambda tp: run(stages_of(WHOLE, tp), batches[0]))
    first, second = (
        {name: grad for name, grad in grads.items() if TINY_MODEL.layout(name).dim is None}
        for _, grads in results
    )
    assert FINAL_NORM in first
    assert_same_bits(first, second)


class Watched(SingleMember):
    """A group of two, alone, that looks where it is called."""

    degree = 2

    def __init__(self) -> None:
        self.in_backward: list[tuple[int, bool]] = []

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        is_free = torch._C._is_multithreading_enabled()
        self.in_backward.append((threading.get_ident(), is_free))


@pytest.mark.parametrize("recompute", [False, True])
def test_collectives_of_a_backward_run_on_the_thread_that_called_it(batches, recompute):
    """A thread of autograd's own serves all ranks of a process: one that blocks it blocks all."""
    group = Watched()
    last = TINY.num_hidden_layers - 1
    parameters = parameters_of(0, last, group.degree, 0)
    options = StageOptions(recompute=recompute)
    stages = [TINY_MODEL.stage(0, last, group, parameters, options)]
    forward(stages, (0, 0), batches[0])
    group.in_backward.clear()
    backward_input(stages, (0, 0))
    assert (threading.get_ident(), False) in group.in_backward
    assert {thread for thread, _ in group.in_backward} == {threading.get_ident()}
    assert torch._C._is_multithreading_enabled(), "as it was, for whoever else calls autograd"


def test_the_loss_counts_targets_only(batches):
    """The loss is a sum over targets, so at initialisation it is about log V for each."""
    for batch in batches:
        loss, _ = run(stages_of(WHOLE), batch)
        per_target = loss / batch.num_targets
        assert per_target == pytest.approx(torch.tensor(TINY.vocab_size).log().item(), rel=0.2)


def test_a_document_does_not_see_its_neighbours(batches):
    """Changing one segment's tokens leaves the output of all other segments as it was."""
    batch = next(batch for batch in batches if len(batch.cu_seqlens) > 2)
    stage = stage_of(0, 1)
    y_TD = stage.forward((0, 0), batch, None, loss_scale=1.0)
    start, end = batch.cu_seqlens[1], batch.cu_seqlens[2]
    batch.input_ids_T[start:end] = 65
    changed_TD = stage.forward((0, 1), batch, None, loss_scale=1.0)
    assert y_TD is not None
    assert changed_TD is not None
    outside = torch.ones(len(y_TD), dtype=torch.bool)
    outside[start:end] = False
    assert torch.equal(y_TD[outside], changed_TD[outside])
    assert not torch.equal(y_TD[start:end], changed_TD[start:end])


def test_outputs_at_stage_borders_are_detached_and_contiguous(batches):
    """What is sent carries no graph and can be read as bytes."""
    first, last = stages_of([(0, 1), (2, 3)])
    y_TD = first.forward((0, 0), batches[0], None, loss_scale=1.0)
    assert y_TD is not None
    last.forward((0, 0), batches[0], y_TD, loss_scale=1.0)
    dx_TD = last.backward_input((0, 0), None)
    assert dx_TD is not None
    for sent in (y_TD, dx_TD):
        assert sent.is_contiguous()
        assert not sent.requires_grad


def test_a_stage_does_not_change_what_it_is_given(batches):
    """Activations, gradients and parameters are the same after F, B and W."""
    stage = stage_of(1, 2)
    x_TD, dy_TD = torch.randn(2, 64, TINY.hidden_size)
    before = x_TD.clone(), dy_TD.clone()
    stage.forward((0, 0), batches[0], x_TD, loss_scale=1.0)
    stage.backward_input((0, 0), dy_TD)
    stage.backward_weight((0, 0))
    assert torch.equal(x_TD, before[0])
    assert torch.equal(dy_TD, before[1])
    assert_same_bits(dict(stage.parameters), parameters_of(1, 2))


def test_misuse_is_caught(batches):
    """A micro-batch forwarded twice, or asked for W before B, is our bug and asserts."""
    stage = stage_of(0, 1)
    stage.forward((0, 0), batches[0], None, loss_scale=1.0)
    with pytest.raises(AssertionError, match="forwarded twice"):
        stage.forward((0, 0), batches[0], None, loss_scale=1.0)
    with pytest.raises(KeyError):
        stage.backward_weight((0, 0))
    with pytest.raises(AssertionError, match="wrong kind of output gradient"):
        stage.backward_input((0, 0), None)
