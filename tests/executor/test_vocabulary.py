"""Tables and logits cut by rows over a TP group, against the whole ones in one place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf
from cases import ThreadGroup
from hypothesis import given
from hypothesis import strategies as st

from resihp.executor.packing import IGNORED_TARGET
from resihp.executor.vocabulary import cross_entropy, embed

DEGREES = st.sampled_from([2, 3, 4])
TOKENS = 6


def rows_of(num_rows: int, degree: int) -> list[slice]:
    bounds = [index * num_rows // degree for index in range(degree + 1)]
    return [slice(bounds[index], bounds[index + 1]) for index in range(degree)]


def targets_of(num_rows: int, generator: torch.Generator) -> torch.Tensor:
    targets_T = torch.randint(num_rows, (TOKENS,), generator=generator)
    return targets_T.where(torch.rand(TOKENS, generator=generator) < 0.7, IGNORED_TARGET)


def cut_loss(logits_TV, targets_T, weights_T, degree):
    """Losses and gradient of the logits, from members that each have their columns only."""

    def member(tp):
        rows = rows_of(logits_TV.shape[1], degree)[tp.index]
        mine_TV = logits_TV[:, rows].clone().requires_grad_()
        losses_T = cross_entropy(mine_TV, targets_T, rows.start, tp)
        (dmine_TV,) = torch.autograd.grad(losses_T, mine_TV, weights_T)
        return losses_T.detach(), dmine_TV

    return ThreadGroup(degree).run(member)


@given(st.integers(0, 999), st.integers(4, 11), DEGREES, st.sampled_from([1.0, 30.0, 1e4]))
def test_the_loss_of_cut_logits_is_that_of_the_whole(seed, num_rows, degree, magnitude):
    """Losses and gradients equal torch's own, in fp64, also where exponentials underflow."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = magnitude * torch.randn(TOKENS, num_rows, dtype=torch.float64, generator=generator)
    targets_T = targets_of(num_rows, generator)
    weights_T = torch.rand(TOKENS, dtype=torch.float64, generator=generator)
    whole_TV = logits_TV.clone().requires_grad_()
    expected_T = nnf.cross_entropy(whole_TV, targets_T, reduction="none")
    (expected_TV,) = torch.autograd.grad(expected_T, whole_TV, weights_T)
    results = cut_loss(logits_TV, targets_T, weights_T, degree)
    for losses_T, _ in results:
        torch.testing.assert_close(losses_T, expected_T.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in results], 1), expected_TV)


@given(st.integers(0, 999), DEGREES)
def test_all_members_have_the_same_bits_of_the_loss(seed, degree):
    """Any of them can report it."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = torch.randn(TOKENS, 11, generator=generator)
    results = cut_loss(logits_TV, targets_of(11, generator), torch.ones(TOKENS), degree)
    assert all(torch.equal(losses_T, results[0][0]) for losses_T, _ in results)


def test_a_token_without_a_target_costs_nothing_and_moves_nothing():
    """Also where its logits are not finite."""
    logits_TV = torch.zeros(2, 4)
    logits_TV[0] = float("nan")
    targets_T = torch.tensor([IGNORED_TARGET, 3])
    for losses_T, _ in cut_loss(logits_TV, targets_T, torch.ones(2), 2):
        assert losses_T.tolist() == [0.0, pytest.approx(torch.tensor(4.0).log().item())]


def test_logits_that_are_not_finite_show_in_the_loss_of_all():
    """The vote skips the step then; a member that saw a number would not."""
    logits_TV = torch.zeros(1, 4)
    logits_TV[0, 3] = float("nan")
    for losses_T, _ in cut_loss(logits_TV, torch.tensor([0]), torch.ones(1), 2):
        assert losses_T.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_a_cut_embedding_gives_the_bits_of_the_whole(degree, dtype):
    """One member has the row and the others add zeros, whatever the type."""
    table_VD, ids_T = torch.randn(10, 3).to(dtype), torch.tensor([9, 0, 4, 4, 2, 3, 7])

    def member(tp):
        rows = rows_of(10, degree)[tp.index]
        return embed(ids_T, table_VD[rows], rows.start, tp)

    for x_TD in ThreadGroup(degree).run(member):
        assert torch.equal(x_TD, table_VD[ids_T])


def test_the_loss_of_bf16_logits_is_computed_in_fp32():
    """Cut or whole, losses are those of the same logits in fp32, and gradients bf16."""
    logits_TV = torch.randn(TOKENS, 8).bfloat16()
    targets_T, weights_T = torch.arange(TOKENS), torch.ones(TOKENS)
    expected_T = nnf.cross_entropy(logits_TV.float(), targets_T, reduction="none")
    for degree in (1, 2):
        for losses_T, dlogits_TV in cut_loss(logits_TV, targets_T, weights_T, degree):
            torch.testing.assert_close(losses_T, expected_T)
            assert dlogits_TV.dtype == torch.bfloat16
