"""The fixed tree: the same bits in any order of arrival and under any hosting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sums import combine_replicas

from resihp.executor.gradients import GradientTree, tree_sum

COUNTS = st.integers(1, 17)


def grads_of(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Gradients of very different magnitude, so that another order shows."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: torch.randn(shape, generator=generator) * 10.0 ** (i % 5)
            for name, shape in (("a", (5, 3)), ("b", (7,)))
        }
        for i in range(count)
    ]


def copies(grads: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [{name: grad.clone() for name, grad in one.items()} for one in grads]


def by_levels(parts: list[torch.Tensor]) -> torch.Tensor:
    """The tree, one level after the other: neighbours are added, a last odd one passes through."""
    while len(parts) > 1:
        parts = [
            parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i]
            for i in range(0, len(parts), 2)
        ]
    return parts[0]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@given(COUNTS)
def test_tree_sum_adds_level_by_level(count):
    """The recursive sum has the bits of the obvious bottom-up one."""
    parts = [grads["a"] for grads in grads_of(count)]
    assert torch.equal(tree_sum(parts), by_levels(parts))


def test_the_order_of_additions_matters_here():
    """A plain running sum has other bits, so the tests of this file can fail."""
    parts = [grads["a"] for grads in grads_of(8)]
    running = parts[0].clone()
    for part in parts[1:]:
        running += part
    assert not torch.equal(tree_sum(parts), running)


@given(COUNTS)
def test_tree_sum_leaves_its_parts_alone(count):
    """The result is a new tensor, and no part changes."""
    parts = [grads["a"] for grads in grads_of(count)]
    before = [part.clone() for part in parts]
    total = tree_sum(parts)
    total.add_(1.0)
    assert all(torch.equal(a, b) for a, b in zip(parts, before, strict=True))


@given(COUNTS, st.integers(0, 15), st.integers(0, 15))
def test_a_slice_of_the_sum_is_the_sum_of_the_slices(count, a, b):
    """So a reduction may be cut into chunks at any place."""
    start, end = sorted((a, b))
    parts = [grads["a"].flatten() for grads in grads_of(count)]
    assert torch.equal(tree_sum(parts)[start:end], tree_sum([part[start:end] for part in parts]))


@given(st.data(), COUNTS)
def test_arrival_order_changes_no_bit(data, count):
    """Micro-batches of two replicas, shuffled together, sum as if they had come in order."""
    grads = {home: grads_of(count, seed=home) for home in (0, 1)}
    tree = GradientTree(2, count)
    arrivals = [(home, mb) for home in (0, 1) for mb in range(count)]
    for home, mb in data.draw(st.permutations(arrivals)):
        tree.add(home, mb, copies(grads[home])[mb])
    for home in (0, 1):
        expected = {name: tree_sum([g[name] for g in grads[home]]) for name in ("a", "b")}
        assert equal(tree.take(home), expected)
    assert tree.num_partials == 0


@given(st.data(), COUNTS)
def test_hosting_changes_no_bit(data, count):
    """Micro-batches of one replica spread over three ranks, partial sums brought together."""
    grads = grads_of(count)
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    trees = [GradientTree(1, count) for _ in range(3)]
    for mb, host in enumerate(hosts):
        trees[host].add(0, mb, copies(grads)[mb])
    home = trees[0]
    for other in trees[1:]:
        for node, partial in other.take_partials(0).items():
            home.add_partial(0, node, partial)
    assert equal(home.take(0), {name: tree_sum([g[name] for g in grads]) for name in ("a", "b")})


@given(COUNTS)
def test_in_order_arrival_keeps_few_partials(count):
    """At most one partial sum per level: log2 of the micro-batches, plus one."""
    tree = GradientTree(1, count)
    for mb, grads in enumerate(grads_of(count)):
        tree.add(0, mb, grads)
        assert tree.num_partials <= count.bit_length()


@given(st.integers(1, 6))
def test_replicas_are_combined_in_a_fixed_tree(count):
    """Name by name, in order of logical replica."""
    sums = grads_of(count)
    expected = {name: by_levels([grads[name] for grads in sums]) for name in ("a", "b")}
    assert equal(combine_replicas(sums), expected)


def test_a_missing_micro_batch_is_caught():
    """A sum that is not complete must not be stepped with."""
    tree = GradientTree(1, 4)
    for mb in (0, 1, 3):
        tree.add(0, mb, grads_of(4)[mb])
    with pytest.raises(AssertionError, match="only"):
        tree.take(0)


@pytest.mark.parametrize("again", [0, 1, 2])
def test_a_micro_batch_counted_twice_is_caught(again):
    """Also when it was already merged into a larger partial sum."""
    tree = GradientTree(1, 4)
    for mb in (0, 1, 2):
        tree.add(0, mb, grads_of(4)[mb])
    with pytest.raises(AssertionError, match="twice"):
        tree.add(0, again, grads_of(4)[again])


def test_a_discarded_tree_starts_anew():
    """After an aborted iteration nothing of it is left in the next sum."""
    tree = GradientTree(1, 2)
    tree.add(0, 0, grads_of(2)[0])
    tree.discard_all()
    for mb, grads in enumerate(grads_of(2, seed=9)):
        tree.add(0, mb, grads)
    expected = grads_of(2, seed=9)
    assert equal(tree.take(0), {n: tree_sum([g[n] for g in expected]) for n in ("a", "b")})
