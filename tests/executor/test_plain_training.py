"""The reference of the parity grid against torch itself."""

from __future__ import annotations

import pytest
import torch
from cases import TINY, parameters_of, text_batches
from parity_bounds import batches_of, bound_of, distance, job_of, trained
from parity_cases import NUM_STEPS
from plain_training import EXACT, HEAD, SINGLE, Arithmetic, learning_rate, loss_and_gradients
from reference import loss_and_grads

from resihp.executor.models import build_model
from resihp.executor.packing import IGNORED_TARGET
from resihp.ir.model import Mesh

JOB = job_of("untied", Mesh(tp=1, pp=1, dp=1))


def test_steps_are_those_of_torchs_optimizer():
    """Ten steps in fp64 with torch's AdamW, clipping and one loss over the global batch."""
    model, batches = build_model(JOB.model), batches_of(1)
    leaves = {
        name: model.initial(name, JOB.job.seed).double().requires_grad_()
        for name in model.tensors(0, model.num_layers - 1)
    }
    config = JOB.optimizer
    decayed = [leaf for leaf in leaves.values() if leaf.dim() == 2]
    others = [leaf for leaf in leaves.values() if leaf.dim() != 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        numbers = range(batches.num_microbatches)
        found = [batches.micro_batch(step, 0, number) for number in numbers]
        num_targets = sum(int((batch.targets_T != IGNORED_TARGET).sum()) for batch in found)
        for batch in found:
            _, grads = loss_and_gradients(JOB.model, leaves, batch, 1.0 / num_targets, EXACT)
            for name, grad in grads.items():
                leaf = leaves[name]
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad
        torch.nn.utils.clip_grad_norm_(leaves.values(), config.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(JOB, step)
        optimizer.step()
    exact = bound_of("untied").exact
    off = {name: distance(leaf.detach(), exact.parameters[name]) for name, leaf in leaves.items()}
    assert max(off.values()) < 1e-12


def test_gradients_are_those_of_the_stages_reference(tmp_path):
    """In single precision, bit by bit; in fp64 up to the rounding of the former."""
    parameters = parameters_of()
    for batch in text_batches(tmp_path, 3):
        loss, grads = loss_and_gradients(TINY, parameters, batch, 0.01)
        expected_loss, expected = loss_and_grads(TINY, parameters, batch, 0.01)
        exact_loss, exact = loss_and_gradients(TINY, parameters, batch, 0.01, EXACT)
        assert loss == expected_loss == pytest.approx(exact_loss, rel=1e-6)
        assert all(torch.equal(grads[name], expected[name]) for name in expected)
        assert max(distance(grads[name], exact[name]) for name in exact) < 1e-6


def test_tied_tables_stay_equal():
    """Both ends of the model get the sum of their gradients."""
    after = bound_of("tied").exact.parameters
    assert torch.equal(after["model.embed_tokens.weight"], after[HEAD])


@pytest.mark.parametrize("parts", [3, 8, 11])
def test_another_order_of_additions_stays_inside_the_bound(parts):
    """Orders that the bound was not measured with come no farther than half of it."""
    bound = bound_of("untied")
    found = trained("untied", Arithmetic(torch.float32, parts))
    shares = {
        name: distance(found.parameters[name], right) / bound.parameters[name]
        for name, right in bound.exact.parameters.items()
    }
    assert max(shares.values()) < 0.75


@pytest.mark.parametrize("tensor", ["self_attn.k_proj.weight", "input_layernorm.weight"])
def test_an_error_of_one_percent_is_far_outside_the_bound(tensor):
    """In one tensor's gradient of one micro-batch of eight."""

    def spoil(key, grads):
        if key == (0, 3):
            grads[f"model.layers.3.{tensor}"].mul_(1.01)

    bound, name = bound_of("untied"), f"model.layers.3.{tensor}"
    found = trained("untied", SINGLE, spoil=spoil)
    off = distance(found.parameters[name], bound.exact.parameters[name])
    assert off > 30 * bound.parameters[name]


def test_global_batches_do_not_depend_on_the_number_of_replicas():
    """Eight micro-batches of one replica are four of each of two."""
    one, two = batches_of(1), batches_of(2)
    for step in range(NUM_STEPS):
        ours = [one.sample_id(step, 0, number) for number in range(8)]
        assert ours == [two.sample_id(step, home, number) for home in (0, 1) for number in range(4)]
