"""AdamW: the published update, the same bits wherever an element lies, and its schedule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resihp.config import OptimizerConfig
from resihp.executor.adamw import AdamW, learning_rate

CONFIG = OptimizerConfig(weight_decay=0.1)
SHAPES = {"matrix": (13, 17), "vector": (23,)}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def test_it_follows_torch():
    """Twenty steps stay within rounding of torch.optim.AdamW, decay on matrices only."""
    ours, theirs = tensors(0), tensors(0)
    mine = AdamW(CONFIG, ours)
    peer = torch.optim.AdamW(
        [
            {"params": [theirs["matrix"]], "weight_decay": CONFIG.weight_decay},
            {"params": [theirs["vector"]], "weight_decay": 0.0},
        ],
        betas=(CONFIG.beta1, CONFIG.beta2),
        eps=CONFIG.eps,
        foreach=False,
    )
    for step in range(20):
        grads, lr = tensors(step + 1), 0.01 * (step + 1)
        for group in peer.param_groups:
            group["lr"] = lr
        for name, grad in grads.items():
            theirs[name].grad = grad
        peer.step()
        mine.step(grads, lr)
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@given(
    rows=st.tuples(st.integers(0, 12), st.integers(1, 13)),
    columns=st.tuples(st.integers(0, 16), st.integers(1, 17)),
)
def test_a_slice_is_updated_as_inside_the_whole(rows, columns):
    """Any rows and columns, at odd offsets and sizes, get the bits they get in the whole tensor."""
    block = slice(rows[0], rows[0] + rows[1]), slice(columns[0], columns[0] + columns[1])
    whole = tensors(0)
    part = {"matrix": whole["matrix"][block].clone()}
    on_whole, on_part = AdamW(CONFIG, whole), AdamW(CONFIG, part)
    for step in range(3):
        grads = tensors(step + 1)
        on_whole.step(grads, lr=0.01, grad_scale=0.7)
        on_part.step({"matrix": grads["matrix"][block].clone()}, lr=0.01, grad_scale=0.7)
    assert torch.equal(part["matrix"], whole["matrix"][block])
    assert torch.equal(on_part.exp_avg["matrix"], on_whole.exp_avg["matrix"][block])
    assert torch.equal(on_part.exp_avg_sq["matrix"], on_whole.exp_avg_sq["matrix"][block])


@given(start=st.integers(0, 40), size=st.integers(1, 41))
def test_the_alignment_of_a_shard_in_memory_does_not_matter(start, size):
    """A view at an odd address is updated like a fresh tensor."""
    base = torch.randn(81, generator=torch.Generator().manual_seed(3))
    grad = torch.randn(81, generator=torch.Generator().manual_seed(4))
    fresh = {"vector": base[start : start + size].clone()}
    AdamW(CONFIG, fresh).step({"vector": grad[start : start + size].clone()}, lr=0.1)
    view = {"vector": base[start : start + size]}
    AdamW(CONFIG, view).step({"vector": grad[start : start + size]}, lr=0.1)
    assert torch.equal(base[start : start + size], fresh["vector"])


def test_gradients_are_kept():
    """They are needed until every rank has reported the step."""
    grads = tensors(1)
    AdamW(CONFIG, tensors(0)).step(grads, lr=0.1, grad_scale=0.5)
    assert all(torch.equal(grads[name], tensors(1)[name]) for name in SHAPES)


def test_the_clip_factor_scales_gradients():
    """A scale passed in does what scaled gradients do."""
    scaled, plain = tensors(0), tensors(0)
    AdamW(CONFIG, scaled).step(tensors(1), lr=0.1, grad_scale=0.25)
    quarter = {name: grad * 0.25 for name, grad in tensors(1).items()}
    AdamW(CONFIG, plain).step(quarter, lr=0.1)
    assert all(torch.equal(scaled[name], plain[name]) for name in SHAPES)


def test_the_bits_do_not_depend_on_the_block(monkeypatch):
    """Large tensors are updated run by run."""
    at_once, in_runs = tensors(0), tensors(0)
    AdamW(CONFIG, at_once).step(tensors(1), lr=0.1)
    monkeypatch.setattr("resihp.executor.adamw._CPU_BLOCK", 3)
    AdamW(CONFIG, in_runs).step(tensors(1), lr=0.1)
    assert all(torch.equal(in_runs[name], at_once[name]) for name in SHAPES)


def test_only_matrices_decay():
    """With zero gradients a norm's weight stays and a matrix shrinks by lr times decay."""
    parameters = tensors(0)
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    AdamW(CONFIG, parameters).step(zeros, lr=0.5)
    assert torch.equal(parameters["vector"], tensors(0)["vector"])
    assert torch.equal(parameters["matrix"], tensors(0)["matrix"] * (1 - 0.5 * 0.1))


def test_moved_state_goes_on_with_the_same_bits():
    """Parameters, both moments and the number of steps are the whole state."""
    straight = tensors(0)
    optimizer = AdamW(CONFIG, straight)
    optimizer.step(tensors(1), lr=0.1)
    moved = {name: value.clone() for name, value in straight.items()}
    restored = AdamW(
        CONFIG,
        moved,
        exp_avg={name: value.clone() for name, value in optimizer.exp_avg.items()},
        exp_avg_sq={name: value.clone() for name, value in optimizer.exp_avg_sq.items()},
        num_steps=optimizer.num_steps,
    )
    optimizer.step(tensors(2), lr=0.1)
    restored.step(tensors(2), lr=0.1)
    assert all(torch.equal(moved[name], straight[name]) for name in SHAPES)


def rate(step: int) -> float:
    return learning_rate(step, peak=1.0, floor=0.1, num_warmup_steps=4, num_steps=20)


def test_the_rate_warms_up_then_falls_to_the_floor():
    """A line up to the peak, a cosine down, and the floor from the last step on."""
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    falling = [rate(step) for step in range(3, 20)]
    assert falling == sorted(falling, reverse=True)
    assert rate(11) == pytest.approx(0.55)
    assert rate(19) == pytest.approx(0.1)
    assert rate(1000) == rate(19)


def test_the_rate_needs_neither_warm_up_nor_decay():
    """Without warm-up it starts below the peak; with nothing but warm-up it ends at the floor."""
    no_warmup = learning_rate(0, peak=1.0, floor=0.0, num_warmup_steps=0, num_steps=2)
    assert no_warmup == pytest.approx(0.5)
    assert learning_rate(5, peak=1.0, floor=0.2, num_warmup_steps=5, num_steps=5) == 0.2
