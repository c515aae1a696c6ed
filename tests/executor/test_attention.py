"""The forms of block-diagonal attention agree, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import dense_attention

from resihp.executor.attention import document_attention, form_for

NUM_TOKENS = 40


@st.composite
def windows(draw):
    """Bounds of segments of every length, and numbers of heads."""
    inner = draw(st.sets(st.integers(1, NUM_TOKENS - 1), max_size=12))
    kv_heads = draw(st.integers(1, 3))
    return (0, *sorted(inner), NUM_TOKENS), kv_heads * draw(st.integers(1, 3)), kv_heads


def inputs_of(num_heads, num_kv_heads, dtype=torch.float64, device="cpu", width=8):
    generator = torch.Generator().manual_seed(num_heads)
    return [
        torch.randn(NUM_TOKENS, heads, width, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]


def outcome(attend, inputs):
    """The output and the gradients of q, k and v for one fixed output gradient."""
    out_THE = attend(*inputs)
    dout_THE = torch.linspace(-1.0, 1.0, out_THE.numel(), dtype=torch.float64)
    dout_THE = dout_THE.view(out_THE.shape).to(out_THE.device, out_THE.dtype)
    return [out_THE.detach(), *torch.autograd.grad(out_THE, inputs, dout_THE)]


@settings(max_examples=60)
@given(windows())
def test_per_document_attention_equals_the_masked_form(window):
    """In fp64 only the order of additions differs: a few units in the last place."""
    cu_seqlens, *heads = window
    inputs = inputs_of(*heads)
    forms = [
        outcome(lambda q, k, v, form=form: document_attention(q, k, v, cu_seqlens, form), inputs)
        for form in ("per-document", "masked")
    ]
    torch.testing.assert_close(*forms, rtol=1e-12, atol=1e-13)


@settings(max_examples=20)
@given(windows())
def test_the_masked_form_is_the_textbook(window):
    """Scores, mask, softmax, sum, written out."""
    cu_seqlens, *heads = window
    inputs = inputs_of(*heads)
    actual = outcome(lambda q, k, v: document_attention(q, k, v, cu_seqlens, "masked"), inputs)
    expected = outcome(lambda q, k, v: dense_attention(q, k, v, cu_seqlens), inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def test_on_cpu_documents_are_attended_one_by_one():
    """The variable-length kernel is for CUDA and half precision."""
    q_THE, k_TKE, v_TKE = inputs_of(4, 2, torch.float32)
    assert form_for(q_THE) == form_for(q_THE.bfloat16()) == "per-document"
    cu_seqlens = (0, 7, NUM_TOKENS)
    chosen = document_attention(q_THE, k_TKE, v_TKE, cu_seqlens)
    assert torch.equal(chosen, document_attention(q_THE, k_TKE, v_TKE, cu_seqlens, "per-document"))


@pytest.mark.gpu
@pytest.mark.parametrize("cu_seqlens", [(0, 40), (0, 1, 2, 17, 39, 40), (0, 8, 16, 24, 32, 40)])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_variable_length_attention_equals_the_masked_form(cu_seqlens, heads):
    """On CUDA in bf16: as near to the fp64 form as bf16 can say it."""
    inputs = inputs_of(*heads, dtype=torch.bfloat16, device="cuda", width=32)
    assert form_for(inputs[0]) == "varlen"
    actual = outcome(lambda q, k, v: document_attention(q, k, v, cu_seqlens, "varlen"), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = outcome(lambda q, k, v: document_attention(q, k, v, cu_seqlens, "masked"), exact)
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=3e-2, atol=3e-2)
