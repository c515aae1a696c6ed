"""Each layer function on its own, in fp64, against numeric or plain gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf
from reference import dense_attention
from reference import rotate as plain_rotate

from resihp.executor.attention import document_attention
from resihp.executor.blocks import FeedForward, Projections, feed_forward, project
from resihp.executor.layers import Affine, Bias, Norm, linear, rms_norm, rotated
from resihp.executor.rope import rope_of, rope_table
from resihp.executor.tp import SingleMember
from resihp.executor.weight_grads import (
    BiasEntry,
    EmbeddingEntry,
    LinearEntry,
    NormEntry,
    WeightGradStore,
)

RUNS = [(0, 1), (1, 2), (3, 2)]
"""First row and number of rows of each member of three, of a table of five."""


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_linear_gradients_are_numeric_ones():
    """dx from B, and dW from W, equal finite differences."""
    x_TI, w_OI = leaf(5, 3), leaf(4, 3)
    assert torch.autograd.gradcheck(
        lambda x: linear(x, Affine("w", w_OI.detach()), WeightGradStore()), (x_TI,)
    )
    store = WeightGradStore()
    linear(x_TI, Affine("w", w_OI.detach()), store).square().sum().backward()
    (expected,) = torch.autograd.grad((x_TI @ w_OI.t()).square().sum(), w_OI)
    torch.testing.assert_close(store.compute()["w"], expected)


def test_bias_gradients_are_numeric_ones():
    """A linear with a bias: dx by finite differences, dW and db by autograd on the formula."""
    x_TI, w_OI, b_O = leaf(5, 3), leaf(4, 3), leaf(4)
    layer = Affine("w", w_OI.detach(), Bias("b", b_O.detach()))
    assert torch.autograd.gradcheck(lambda x: linear(x, layer, WeightGradStore()), (x_TI,))
    store = WeightGradStore()
    linear(x_TI, layer, store).square().sum().backward()
    expected = torch.autograd.grad((x_TI @ w_OI.t() + b_O).square().sum(), (w_OI, b_O))
    grads = store.compute()
    torch.testing.assert_close((grads["w"], grads["b"]), expected)


def test_rms_norm_gradients_are_numeric_ones():
    """dx by finite differences, dw by autograd on the formula."""
    x_TD, w_D = leaf(5, 6), leaf(6)
    assert torch.autograd.gradcheck(
        lambda x: rms_norm(x, Norm("w", w_D.detach(), 1e-5), WeightGradStore()), (x_TD,)
    )
    store = WeightGradStore()
    rms_norm(x_TD, Norm("w", w_D.detach(), 1e-5), store).pow(3).sum().backward()
    plain_TD = x_TD * torch.rsqrt(x_TD.pow(2).mean(-1, keepdim=True) + 1e-5) * w_D
    (expected,) = torch.autograd.grad(plain_TD.pow(3).sum(), w_D)
    torch.testing.assert_close(store.compute()["w"], expected)


def affine_of(outputs: int, inputs: int) -> Affine:
    w_OI, b_O = torch.randn(outputs, inputs).double(), torch.randn(outputs).double()
    return Affine("w", w_OI, Bias("b", b_O))


def norm_of(width: int) -> Norm:
    return Norm("w", torch.randn(width).double(), 1e-5)


def test_a_residual_gets_the_gradient_of_the_sum():
    """Both inputs of a linear that ends a block."""
    layer = affine_of(4, 3)
    assert torch.autograd.gradcheck(
        lambda x, residual: linear(x, layer, WeightGradStore(), residual_TO=residual),
        (leaf(5, 3), leaf(5, 4)),
    )


def test_feed_forward_gradients_are_those_of_the_formula():
    """dx from B and all of W's, though the product of both factors is made only in B."""
    x_TD, gate_FD, up_FD, down_DF, w_D = leaf(5, 4), leaf(6, 4), leaf(6, 4), leaf(4, 6), leaf(4)
    named = {"gate": gate_FD, "up": up_FD, "down": down_DF}
    linears = (Affine(name, weight.detach()) for name, weight in named.items())
    layers, store = FeedForward(Norm("norm", w_D.detach(), 1e-5), *linears), WeightGradStore()
    out_TD = feed_forward(x_TD, layers, store, SingleMember())
    (dx_TD,) = torch.autograd.grad(out_TD.pow(3).sum(), x_TD)
    normed_TD = nnf.rms_norm(x_TD, (4,), w_D, 1e-5)
    product_TF = nnf.silu(normed_TD @ gate_FD.t()) * (normed_TD @ up_FD.t())
    plain_TD = x_TD + product_TF @ down_DF.t()
    torch.testing.assert_close(out_TD, plain_TD)
    leaves = {"x": x_TD, "norm": w_D, **named}
    expected = torch.autograd.grad(plain_TD.pow(3).sum(), tuple(leaves.values()))
    torch.testing.assert_close(
        {"x": dx_TD, **store.compute()}, dict(zip(leaves, expected, strict=True))
    )


def test_projection_gradients_are_numeric_ones():
    """Of queries, keys and values together; B turns gradients back by the same angles."""
    rope = rope_table(torch.arange(5), rope_of(4, 100.0))
    layers = Projections(norm_of(6), affine_of(8, 6), affine_of(4, 6), affine_of(4, 6), 4)
    assert torch.autograd.gradcheck(
        lambda x: project(x, rope, layers, WeightGradStore(), SingleMember()), (leaf(5, 6),)
    )


def test_rotation_pairs_the_halves_of_a_head():
    """The pairing of Hugging Face's LLaMA: channel i with channel i + E/2."""
    positions_T = torch.tensor([0, 1, 2, 0, 1])
    x_THE = torch.randn(5, 2, 8)
    rope = rope_of(8, 10000.0)
    cos_T1e, sin_T1e = rope_table(positions_T, rope)
    assert torch.equal(rotated(x_THE, cos_T1e, sin_T1e), plain_rotate(x_THE, positions_T, rope))


def test_scores_depend_on_relative_positions_only():
    """What rotary positions are for: q·k is the same when both move on by the same amount."""
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned = [
            rotated(x, *rope_table(torch.tensor([at]), rope_of(8, 10000.0)))
            for x, at in ((q, at_q), (k, at_k))
        ]
        return (turned[0] * turned[1]).sum()

    # Angles are fp32, as in the checkpoints' own code, hence the tolerance.
    torch.testing.assert_close(score(7, 3), score(27, 23), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cu_seqlens", [(0, 12), (0, 5, 12), (0, 1, 2, 9, 12)])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_document_attention_equals_the_dense_masked_form(cu_seqlens, num_kv_heads):
    """Outputs and gradients equal softmax over the whole window with a block-diagonal mask."""
    inputs = leaf(12, 4, 8), leaf(12, num_kv_heads, 8), leaf(12, num_kv_heads, 8)
    dy_THE = torch.randn(12, 4, 8, dtype=torch.float64)
    ours, dense = document_attention(*inputs, cu_seqlens), dense_attention(*inputs, cu_seqlens)
    torch.testing.assert_close(ours, dense)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, dy_THE), torch.autograd.grad(dense, inputs, dy_THE)
    )


def test_embedding_gradient_adds_the_rows_of_equal_tokens():
    """A token that occurs twice gets both rows, one that does not occur gets zero."""
    dx_TD = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    grad_VD = EmbeddingEntry("e", torch.tensor([2, 0, 2]), dx_TD, 0, 4).compute()
    assert grad_VD.tolist() == [[10.0, 20.0], [0.0, 0.0], [101.0, 202.0], [0.0, 0.0]]


def test_members_of_a_cut_embedding_have_the_gradient_of_their_rows():
    """Rows that lie elsewhere are added nowhere, and those here get the bits of the whole."""
    ids_T, dx_TD = torch.tensor([2, 0, 2, 4]), torch.randn(4, 2)
    whole_VD = EmbeddingEntry("e", ids_T, dx_TD, 0, 5).compute()
    parts = [EmbeddingEntry("e", ids_T, dx_TD, first, rows).compute() for first, rows in RUNS]
    assert torch.equal(torch.cat(parts), whole_VD)


ENTRIES = [
    LinearEntry("w", torch.randn(5, 3), torch.randn(5, 4)),
    LinearEntry("w", torch.randn(5, 3).bfloat16(), torch.randn(5, 4).bfloat16()),
    BiasEntry("w", torch.randn(5, 4).bfloat16()),
    NormEntry("w", torch.randn(5, 3), torch.rand(5, 1), torch.randn(5, 3)),
    *(EmbeddingEntry("w", torch.tensor([2, 0, 2, 4]), torch.randn(4, 2), *run) for run in RUNS),
    EmbeddingEntry("w", torch.tensor([2, 0, 2, 4]), torch.randn(4, 2).bfloat16(), 1, 2),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_a_gradient_added_to_a_sum_is_the_gradient_added_to_it(entry):
    """With or without a pass of its own; the sum is fp32."""
    total = torch.randn(entry.compute().shape)
    expected = total + entry.compute()
    entry.add_to(total)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)


def test_a_store_is_empty_after_w_and_adds_the_uses_of_a_weight():
    """A shared weight has an entry for each use; they are added in the order of B."""
    store = WeightGradStore()
    scales = (1.0, 3e-8, -1.0)
    entries = [LinearEntry("w", torch.ones(2, 3), torch.full((2, 4), scale)) for scale in scales]
    for entry in entries:
        store.push(entry)
    expected = (entries[0].compute() + entries[1].compute()) + entries[2].compute()
    assert torch.equal(store.compute()["w"], expected)
    assert store.compute() == {}
