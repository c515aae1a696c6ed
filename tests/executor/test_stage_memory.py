"""What a stage keeps alive, seen at the level of storages, below autograd's own references."""

from __future__ import annotations

import pytest
import torch
from cases import LOSS_SCALE, TINY, TINY_MODEL, parameters_of, stage_of, text_batches
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from resihp.executor.llama import head_dim
from resihp.executor.model import StageOptions
from resihp.executor.tp import SingleMember

KEY = (0, 0)
NUM_TOKENS = 64


class LiveStorages(TorchDispatchMode):
    """Storages made while it is active, and which of them are still held by anybody."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            x.untyped_storage().data_ptr()
            for x in args
            if isinstance(x, torch.Tensor) and x.numel()
        }
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(made, torch.Tensor) or not made.numel():
                continue
            storage = made.untyped_storage()
            if storage.data_ptr() not in given:
                ref = StorageWeakRef(storage)
                self._seen[ref.cdata] = (ref, storage.nbytes())
        return result

    @property
    def num_bytes(self) -> int:
        return sum(size for ref, size in self._seen.values() if not ref.expired())


@pytest.fixture
def batch(tmp_path):
    return text_batches(tmp_path, 1, NUM_TOKENS)[0]


@pytest.fixture
def live():
    with LiveStorages() as mode:
        yield mode


def weight_operand_bytes(num_layers: int) -> int:
    """What W reads: inputs and output gradients of every linear and norm, each tensor once."""
    hidden, ffn = TINY.hidden_size, TINY.intermediate_size
    kv_width = TINY.num_key_value_heads * head_dim(TINY)
    norms = 2 * (hidden + 1 + hidden)  # x, 1/rms and dy of both norms
    inputs = hidden + hidden + hidden + ffn  # of q, k, v; of o; of gate, up; of down
    # Of q, k, v; of o; of gate and up; of down.
    output_grads = hidden + 2 * kv_width + hidden + 2 * ffn + hidden
    return 4 * NUM_TOKENS * num_layers * (norms + inputs + output_grads)


def test_nothing_is_alive_after_w(batch, live):
    """After F, B and W of a middle stage only what the caller holds is left: here nothing."""
    stage = stage_of(1, 2)
    before = live.num_bytes
    x_TD, dy_TD = (
        torch.randn(NUM_TOKENS, TINY.hidden_size),
        torch.randn(NUM_TOKENS, TINY.hidden_size),
    )
    assert stage.forward(KEY, batch, x_TD, loss_scale=LOSS_SCALE) is not None
    assert stage.backward_input(KEY, dy_TD) is not None
    assert stage.backward_weight(KEY)
    del x_TD, dy_TD
    assert live.num_bytes == before


def test_only_the_operands_of_w_are_alive_after_b(batch, live):
    """B lets go of all that autograd saved: attention, gates, rotary tables, log-softmax."""
    stage = stage_of(1, 2)
    before = live.num_bytes
    stage.forward(KEY, batch, torch.randn(NUM_TOKENS, TINY.hidden_size), loss_scale=LOSS_SCALE)
    after_f = live.num_bytes - before
    stage.backward_input(KEY, torch.randn(NUM_TOKENS, TINY.hidden_size))
    after_b = live.num_bytes - before
    assert 0 < after_b <= weight_operand_bytes(num_layers=2)
    assert after_f > 0


def test_an_output_is_not_kept_by_its_stage(batch, live):
    """The activation's storage is free as soon as the sender lets go of it, before B."""
    stage = stage_of(1, 1)
    y_TD = stage.forward(
        KEY, batch, torch.randn(NUM_TOKENS, TINY.hidden_size), loss_scale=LOSS_SCALE
    )
    assert y_TD is not None
    with_output = live.num_bytes
    size = y_TD.untyped_storage().nbytes()
    del y_TD
    assert live.num_bytes == with_output - size


def test_the_last_stage_keeps_a_loss_and_nothing_else(batch, live):
    """Eight bytes per micro-batch are left after W: the loss that is reported at the step."""
    stage = stage_of(0, 3)
    before = live.num_bytes
    stage.forward(KEY, batch, None, loss_scale=LOSS_SCALE)
    stage.backward_input(KEY, None)
    stage.backward_weight(KEY)
    assert live.num_bytes - before <= 8


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 2), (2, 3)])
def test_a_stage_that_recomputes_keeps_its_input_until_b(batch, live, first, last):
    """Nothing at all on the first stage, and the loss on the last; after B it is as any other."""
    parameters = parameters_of(first, last)
    plain, recomputing = (
        TINY_MODEL.stage(first, last, SingleMember(), parameters, StageOptions(recompute=on))
        for on in (False, True)
    )
    x_TD = None if first == 0 else torch.randn(NUM_TOKENS, TINY.hidden_size)
    dy_TD = None if last == 3 else torch.randn(NUM_TOKENS, TINY.hidden_size)
    alive: list[tuple[int, int]] = []
    for stage in (plain, recomputing):
        before = live.num_bytes
        stage.forward(KEY, batch, x_TD, loss_scale=LOSS_SCALE)
        after_f = live.num_bytes - before
        stage.backward_input(KEY, dy_TD)
        alive.append((after_f, live.num_bytes - before))
        stage.discard_all()
    assert alive[1][0] <= 8 < alive[0][0]
    assert alive[1][1] == alive[0][1]


@pytest.mark.parametrize("with_backward", [False, True])
def test_discarding_frees_micro_batches_in_any_phase(batch, live, with_backward):
    """After an aborted iteration a stage is as new."""
    stage = stage_of(0, 3)
    before = live.num_bytes
    stage.forward(KEY, batch, None, loss_scale=LOSS_SCALE)
    if with_backward:
        stage.backward_input(KEY, None)
    assert live.num_bytes > before
    stage.discard_all()
    assert live.num_bytes == before
    assert stage.is_idle
