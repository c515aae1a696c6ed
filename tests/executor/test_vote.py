"""The vote: one exchange that every member counts the same way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from odd_model import ODD, logical
from torch import Tensor

from resihp.executor.boundary import Ask
from resihp.executor.layouts import local_shard
from resihp.executor.vote import Contribution, Voter, counted_here, read_together, squared_norms

NAMES = ["b", "a"]


def contribution(
    finite: bool = True,
    losses: dict[int, float] | None = None,
    samples: dict[int, int] | None = None,
    norms: dict[str, float] | None = None,
) -> Contribution:
    return Contribution(finite, losses or {}, samples or {}, norms or {})


def rows(voter: Voter, *contributions: Contribution) -> Tensor:
    """As the all-gather lays them."""
    return torch.stack([voter.pack(each) for each in contributions])


def test_losses_samples_and_norms_of_all_ranks_come_together():
    """Losses and samples in order of micro-batch, whoever computed them."""
    voter = Voter(NAMES, 3)
    outcome = voter.count(
        rows(
            voter,
            contribution(losses={2: 4.0}, samples={2: 0}),
            contribution(norms={"a": 9.0}),
            contribution(losses={0: 1.0, 1: 2.0}, samples={0: 70, 1: 1 << 40}),
            contribution(norms={"b": 16.0}),
        )
    )
    assert outcome == (True, 7.0, (70, 1 << 40, 0), 5.0, Ask.NOTHING, 0)


def test_what_any_rank_was_asked_for_all_ranks_know():
    """So that all of them act after the same step."""
    voter = Voter(NAMES, 1)
    asked = (Ask.NOTHING, Ask.YIELD, Ask.YIELD | Ask.AUDIT)
    brought = [contribution(samples={0: 5})] + [contribution()] * 2
    each = [one._replace(asked=what) for one, what in zip(brought, asked, strict=True)]
    assert voter.count(rows(voter, *each)).asked == Ask.YIELD | Ask.AUDIT


def test_snapshots_are_as_far_apart_as_the_rank_that_they_cost_most_wants():
    """All take the largest, so that all keep the same versions."""
    voter = Voter(NAMES, 1)
    brought = [contribution(samples={0: 5})] + [contribution()] * 2
    each = [one._replace(gap=gap) for one, gap in zip(brought, (1, 7, 0), strict=True)]
    assert voter.count(rows(voter, *each)).gap == 7


@pytest.mark.parametrize("place", range(3))
def test_one_rank_without_finite_gradients_is_enough(place: int):
    """Then all ranks skip the step together."""
    voter = Voter(NAMES, 1)
    brought = [contribution(samples={0: 5})] + [contribution()] * 2
    brought[place] = brought[place]._replace(finite=False)
    assert not voter.count(rows(voter, *brought)).finite


def test_norms_that_are_not_numbers_do_not_break_the_count():
    """The step is skipped, and its record says what the norm was."""
    voter = Voter(NAMES, 1)
    bad = contribution(False, {0: math.inf}, {0: 5}, {"a": math.nan})
    outcome = voter.count(rows(voter, bad))
    assert (outcome.finite, outcome.loss_sum) == (False, math.inf)
    assert math.isnan(outcome.grad_norm)


@pytest.mark.parametrize("samples", [[{0: 1}], [{0: 1, 1: 2}, {1: 2}]], ids=["nobody", "two"])
def test_a_micro_batch_must_be_brought_by_one_rank(samples: list[dict[int, int]]):
    """[T17] A plan that does otherwise was not verified: a bug of ours."""
    voter = Voter(NAMES, 2)
    brought = [contribution(samples=each) for each in samples]
    with pytest.raises(AssertionError, match="ranks brought the loss of one micro-batch"):
        voter.count(rows(voter, *brought))


numbers = st.floats(-1e6, 1e6).map(lambda x: x / 3)


@given(st.lists(numbers, min_size=4, max_size=4), st.permutations(range(4)))
def test_the_sum_of_losses_does_not_depend_on_who_brought_them(
    losses: list[float], owners: list[int]
):
    """It is added in order of micro-batch; zeros of others change nothing."""
    voter = Voter(NAMES, 4)

    def total(owner_of: list[int]) -> float:
        table = [contribution() for _ in range(4)]
        for number, owner in enumerate(owner_of):
            before = table[owner]
            table[owner] = contribution(
                losses={**before.losses, number: losses[number]},
                samples={**before.samples, number: number},
            )
        return voter.count(rows(voter, *table)).loss_sum

    expected = ((losses[0] + losses[1]) + losses[2]) + losses[3]
    assert total(owners) == total([0, 0, 0, 0]) == expected


def test_norms_are_added_in_order_of_name_then_rank():
    """In fp64, so that all ranks clip by the same bits."""
    voter = Voter(NAMES, 0)
    outcome = voter.count(
        rows(voter, contribution(norms={"b": 0.3, "a": 1e17}), contribution(norms={"a": -1e17}))
    )
    assert outcome.grad_norm == math.sqrt((1e17 - 1e17) + 0.3)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_each_logical_element_counts_once(degree: int):
    """Shards are added over the members; copies and replicated tensors count on the first only.

    Of a tied pair the input side counts.
    """
    whole = logical(3)
    total = 0.0
    for index in range(degree):
        held = {name: local_shard(ODD.layout(name), whole[name], degree, index) for name in whole}
        squares = squared_norms(held)
        total += sum(float(squares[name]) for name in counted_here(ODD, whole, degree, index))
    expected = sum(
        float(tensor.double().square().sum()) for name, tensor in whole.items() if name != "head"
    )
    assert total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_norm_says_whether_all_is_finite(bad: float):
    """One element is enough, and only its own tensor is not finite."""
    tensors = logical(3)
    tensors["2.wide"][4, 1] = bad
    squares = squared_norms(tensors)
    assert [name for name, square in squares.items() if not math.isfinite(square)] == ["2.wide"]


def test_numbers_are_read_in_their_order():
    """Exactly: they are fp64 all the way."""
    numbers = [1 / 3, -0.0, 1e300, 2.0**53 - 1]
    assert read_together([torch.tensor(each, dtype=torch.float64) for each in numbers]) == numbers
    assert read_together([]) == []


def test_a_norm_does_not_overflow():
    """The square of the largest fp32 number fits in fp64."""
    huge = {"model.norm.weight": torch.full((16,), 3e38)}
    (norm,) = squared_norms(huge).values()
    assert math.isfinite(norm)
