"""The reduction: the same bits whoever computed what, over whatever TP degrees."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
import torch
from cases import assert_same_bits
from exchange import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import one_stage
from odd_model import ODD, logical, partial_gradients, shards
from sums import combine_replicas
from torch import Tensor

from resihp.executor.device.interface import Communicator
from resihp.executor.gradients import GradientTree
from resihp.executor.memberships import num_chunks_at
from resihp.executor.model import Model
from resihp.executor.reduce import (
    FastReducer,
    OrderedReducer,
    Reducer,
    hosted_nodes,
    weights_run_by,
)
from resihp.executor.shards import StageShards
from resihp.ir.expand import expand
from resihp.ir.model import Plan

COPIED = ("keys", "bias")
DEGREES = [
    ({0: 1}, 1),
    ({0: 2}, 1),
    ({0: 8}, 1),
    ({0: 1, 1: 1}, 2),
    ({0: 2, 1: 2}, 2),
    ({0: 4, 1: 4}, 2),
    ({0: 2, 1: 1}, 2),
    ({0: 1, 1: 2}, 2),
    ({0: 1, 1: 1, 2: 2}, 3),
    ({0: 4, 1: 1, 2: 2}, 3),
    ({0: 8, 1: 1, 2: 4}, 3),
    ({1: 2}, 2),
    ({0: 1, 2: 2}, 3),
    ({1: 1, 2: 4, 3: 2}, 4),
    ({0: 2, 3: 1}, 5),
]
Make = Callable[[Model, Plan, int, Mapping[str, Communicator]], Reducer]


def shards_of(model: Model, plan: Plan, rank: int) -> StageShards:
    program = expand(plan, rank)
    names = model.tensors(*program.layers[0])
    return StageShards(model, names, num_chunks_at(plan, 0), program.tp, program.tp_index)


def groups_in(found: Mapping[str, Communicator]) -> dict[int, Communicator]:
    return {int(role.split(".")[1]): group for role, group in found.items() if "reduce" in role}


def ordered(
    model: Model, plan: Plan, rank: int, groups: Mapping[str, Communicator]
) -> OrderedReducer:
    shape = plan.mesh.dp, plan.batch.microbatches
    run_by = weights_run_by(plan, 0)
    nodes = {
        member: hosted_nodes(run_by[group.replica], *shape)
        for group in plan.groups
        for member in group.ranks
    }
    gather = groups["gather"]
    return OrderedReducer(shards_of(model, plan, rank), groups_in(groups), gather, nodes, *shape)


def fast(model: Model, plan: Plan, rank: int, groups: Mapping[str, Communicator]) -> FastReducer:
    return FastReducer(shards_of(model, plan, rank), groups_in(groups), groups["gather"])


def seed_of(home: int, number: int) -> int:
    return 1000 * home + number


def reduced_by_all(
    plan: Plan, make: Make, gradients=partial_gradients, num_times: int = 1
) -> dict[int, dict[str, Tensor]]:
    """By rank, with every rank of the stage on a thread of its own."""

    def work(rank: int, groups: Mapping[str, Communicator]) -> dict[str, Tensor]:
        program = expand(plan, rank)
        reducer = make(ODD, plan, rank, groups)
        reduced: dict[str, Tensor] = {}
        for _ in range(num_times):
            for home, number in weights_run_by(plan, 0)[program.group.replica]:
                reducer.add((home, number), gradients(program, seed_of(home, number)))
            reduced = reducer.reduce()
        return {name: tensor.clone() for name, tensor in reduced.items()}

    results = run_ranks(ODD, plan, work)
    assert results.keys() == set(plan.active_ranks)
    return results


def reduced_by_one(num_replicas: int, num_microbatches: int) -> dict[str, Tensor]:
    """The oracle: one rank that computed everything, with whole tensors."""
    tree = GradientTree(num_replicas, num_microbatches)
    for replica in range(num_replicas):
        for number in range(num_microbatches):
            tree.add(replica, number, logical(seed_of(replica, number)))
    return combine_replicas([tree.take(replica) for replica in range(num_replicas)])


def exact(num_replicas: int, num_microbatches: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sum in fp64, in which order does not matter, and that of the magnitudes."""
    parts = [
        logical(seed_of(replica, number))
        for replica in range(num_replicas)
        for number in range(num_microbatches)
    ]
    total = {name: sum(part[name].double() for part in parts) for name in parts[0]}
    size = {name: sum(part[name].double().abs() for part in parts) for name in parts[0]}
    return total, size  # type: ignore[return-value]


@pytest.mark.parametrize(("degrees", "num_replicas"), DEGREES, ids=str)
@pytest.mark.parametrize("num_microbatches", [1, 3, 4])
def test_the_bits_do_not_depend_on_who_ran_what(
    degrees: dict[int, int], num_replicas: int, num_microbatches: int
):
    """Unequal degrees, near-equal runs and dropped replicas give what one rank alone would have."""
    plan = one_stage(degrees, num_replicas, num_microbatches)
    expected = reduced_by_one(num_replicas, num_microbatches)
    has_copies = max(degrees.values()) > 2
    for rank, reduced in reduced_by_all(plan, ordered).items():
        wanted = shards(expand(plan, rank), expected)
        for name in [name for name in wanted if has_copies and name.endswith(COPIED)]:
            torch.testing.assert_close(reduced.pop(name), wanted.pop(name), rtol=1e-4, atol=1e-3)
        assert_same_bits(reduced, wanted)


@pytest.mark.parametrize("make", [ordered, fast])
@pytest.mark.parametrize(("degrees", "num_replicas"), DEGREES, ids=str)
def test_the_sum_is_that_of_all_micro_batches(
    degrees: dict[int, int], num_replicas: int, make: Make
):
    """Of copies too, whose parts are added up; a second iteration begins from nothing."""
    plan = one_stage(degrees, num_replicas, 3)
    total, size = exact(num_replicas, 3)
    for rank, reduced in reduced_by_all(plan, make, num_times=2).items():
        program = expand(plan, rank)
        wanted, bound = shards(program, total), shards(program, size)
        assert reduced.keys() == wanted.keys()
        for name, tensor in reduced.items():
            assert ((tensor.double() - wanted[name]).abs() <= 2e-6 * bound[name]).all(), name


@pytest.mark.parametrize("make", [ordered, fast])
@pytest.mark.parametrize(("degrees", "num_replicas"), DEGREES, ids=str)
def test_all_who_hold_an_element_get_the_same_bits(
    degrees: dict[int, int], num_replicas: int, make: Make
):
    """Replicas and TP members must not drift apart, in either mode."""
    plan = one_stage(degrees, num_replicas, 3)
    results = reduced_by_all(plan, make)
    whole: dict[str, Tensor] = {}
    for rank, reduced in results.items():
        program = expand(plan, rank)
        for name, tensor in reduced.items():
            known = whole.setdefault(name, torch.full(ODD.layout(name).shape, float("nan")))
            here = shards(program, {**logical(0), name: known})[name]
            seen = ~here.isnan()
            assert torch.equal(here[seen], tensor[seen]), f"rank {rank} differs in {name}"
            numbered = torch.arange(float(known.numel())).view(known.shape)
            place = shards(program, {**logical(0), name: numbered})[name].long()
            known.view(-1)[place.view(-1)] = tensor.reshape(-1)
    assert not any(tensor.isnan().any() for tensor in whole.values())


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[int, int], int]:
    """TP degree by replica of those that are left, at most twelve ranks, and all replicas."""
    num_replicas = draw(st.integers(1, 4))
    degrees: dict[int, int] = {}
    for replica in range(num_replicas):
        tp = draw(st.sampled_from([0, 1, 2, 4, 8]))
        if tp and sum(degrees.values()) + tp <= 12:
            degrees[replica] = tp
    return degrees or {0: 1}, num_replicas


@settings(max_examples=25)
@given(layouts(), st.integers(1, 5), st.sampled_from([ordered, fast]))
def test_any_layout_sums_all_micro_batches(
    layout: tuple[dict[int, int], int], num_microbatches: int, make: Make
):
    """With the same bits on all replicas for what they hold of a chunk."""
    plan = one_stage(*layout, num_microbatches)
    total, size = exact(layout[1], num_microbatches)
    norms: list[Tensor] = []
    for rank, reduced in reduced_by_all(plan, make).items():
        program = expand(plan, rank)
        wanted, bound = shards(program, total), shards(program, size)
        for name, tensor in reduced.items():
            assert ((tensor.double() - wanted[name]).abs() <= 2e-6 * bound[name]).all(), name
        norms.append(reduced["1.norm"])
    assert all(torch.equal(norm, norms[0]) for norm in norms)


def test_copies_have_the_same_bits_whoever_ran_what():
    """A replica is dropped and its micro-batches run elsewhere, at the same degree."""
    before = reduced_by_all(one_stage({0: 4, 1: 4, 2: 4}, 3, 4), ordered)
    after = reduced_by_all(one_stage({0: 4, 2: 4}, 3, 4), ordered)
    for rank, reduced in after.items():
        assert_same_bits(reduced, before[rank % 4])


@pytest.mark.parametrize("make", [ordered, fast])
def test_buckets_change_no_bits_of_ordered_sums(monkeypatch, make: Make):
    """Exchanged tensor by tensor as at once; fast sums depend on the lengths, but stay equal."""
    plan = one_stage({0: 4, 1: 1, 2: 2}, 3, 3)
    at_once = reduced_by_all(plan, make)
    monkeypatch.setattr("resihp.executor.shards._BUCKET", 10)
    bit_by_bit = reduced_by_all(plan, make)
    for rank, reduced in bit_by_bit.items():
        if make is ordered:
            assert_same_bits(reduced, at_once[rank])
        for name, tensor in reduced.items():
            torch.testing.assert_close(tensor, at_once[rank][name], rtol=1e-3, atol=1e-2)
    norm = {rank: reduced["2.norm"] for rank, reduced in bit_by_bit.items()}
    assert all(torch.equal(each, norm[0]) for each in norm.values())


def test_the_order_of_additions_matters_for_these_gradients():
    """Otherwise the tests above could not fail."""
    parts = [logical(seed_of(replica, number)) for replica in (0, 1) for number in (0, 1, 2)]
    plain = sum(part["0.wide"] for part in parts)
    assert isinstance(plain, Tensor)
    assert not torch.equal(plain, reduced_by_one(2, 3)["0.wide"])


@pytest.mark.parametrize("make", [ordered, fast])
def test_bf16_gradients_are_summed_in_fp32(make: Make):
    """Three numbers that bf16 cannot hold the sum of."""

    def rounded(program, seed):
        return {n: g.to(torch.bfloat16) for n, g in shards(program, logical(seed)).items()}

    plan = one_stage({0: 1, 1: 1}, 2, 2)
    parts = [logical(seed_of(home, n)) for home in (0, 1) for n in (0, 1)]
    for reduced in reduced_by_all(plan, make, gradients=rounded).values():
        for name, tensor in reduced.items():
            assert tensor.dtype == torch.float32
            exactly = sum(part[name].to(torch.bfloat16).double() for part in parts)
            bound = sum(part[name].double().abs() for part in parts)
            assert ((tensor.double() - exactly).abs() <= 1e-6 * bound).all()


@pytest.mark.parametrize("make", [ordered, fast])
def test_sums_of_an_aborted_iteration_are_dropped(make: Make):
    """What is discarded is in no later sum."""
    plan = one_stage({0: 2}, 1, 1)

    def work(rank: int, groups: Mapping[str, Communicator]) -> dict[str, Tensor]:
        program, reducer = expand(plan, rank), make(ODD, plan, rank, groups)
        reducer.add((0, 0), partial_gradients(program, 5))
        reducer.discard()
        reducer.add((0, 0), partial_gradients(program, 6))
        return reducer.reduce()

    for rank, reduced in run_ranks(ODD, plan, work).items():
        assert_same_bits(reduced, shards(expand(plan, rank), logical(6)))


def test_every_micro_batch_is_in_one_hosted_node():
    """What the members expect of each other covers the global batch exactly once."""
    plan = one_stage({0: 1, 2: 1}, 3, 5)
    leaves: list[tuple[int, int]] = []
    for keys in weights_run_by(plan, 0).values():
        for home, node in hosted_nodes(keys, 3, 5):
            first = node.number << node.level
            leaves += [(home, n) for n in range(first, min(first + (1 << node.level), 5))]
    assert sorted(leaves) == [(home, n) for home in range(3) for n in range(5)]


@given(st.integers(0, 2**32), st.sampled_from([ordered, fast]))
@settings(max_examples=30, deadline=None)
def test_sums_of_an_interrupted_iteration_go_on_in_another_reducer(seed: int, make: Make):
    """[T16] Ordered ones to the bit, whatever was done and whatever of it is dropped."""
    rng = random.Random(seed)
    degrees, num_replicas = rng.choice([d for d in DEGREES if len(d[0]) > 1])
    plan = one_stage(degrees, num_replicas, rng.choice((1, 3, 4)))
    runs = weights_run_by(plan, 0)
    order = {replica: rng.sample(keys, len(keys)) for replica, keys in runs.items()}
    num_done = {replica: rng.randint(0, len(keys)) for replica, keys in runs.items()}
    unlucky = {key for keys in runs.values() for key in keys if rng.random() < 0.2}

    def work(rank: int, groups: Mapping[str, Communicator]) -> dict[str, Tensor]:
        program = expand(plan, rank)
        replica = program.group.replica
        first, second = make(ODD, plan, rank, groups), make(ODD, plan, rank, groups)
        keys, done = order[replica], num_done[replica]
        for key in keys[:done]:
            first.add(key, partial_gradients(program, seed_of(*key)))
        sets = first.held()
        assert {key for each in sets for key in each.keys} == set(keys[:done])
        kept = [each for each in sets if each.keys.isdisjoint(unlucky)]
        first.discard()
        before = [{name: tensor.clone() for name, tensor in each.sums.items()} for each in kept]
        second.put(kept)
        for key in keys:
            if not any(key in each.keys for each in kept):
                second.add(key, partial_gradients(program, seed_of(*key)))
        reduced = {name: tensor.clone() for name, tensor in second.reduce().items()}
        for each, was in zip(kept, before, strict=True):
            assert_same_bits(dict(each.sums), was)
        return reduced

    results, expected = run_ranks(ODD, plan, work), reduced_by_all(plan, make)
    assert results.keys() == expected.keys()
    for rank, reduced in results.items():
        if make is ordered:
            assert_same_bits(reduced, expected[rank])
        else:
            torch.testing.assert_close(reduced, expected[rank], rtol=1e-4, atol=1e-3)


def test_ordered_sums_are_held_until_the_iteration_after():
    """[T16] A death in the vote finds them as they were before they were reduced."""
    plan = one_stage({0: 1, 1: 2}, 2, 3)

    def work(rank: int, groups: Mapping[str, Communicator]) -> None:
        program = expand(plan, rank)
        reducer = ordered(ODD, plan, rank, groups)
        keys = weights_run_by(plan, 0)[program.group.replica]
        for key in keys:
            reducer.add(key, partial_gradients(program, seed_of(*key)))
        before = [{n: t.clone() for n, t in each.sums.items()} for each in reducer.held()]
        reducer.reduce()
        after = reducer.held()
        assert {key for each in after for key in each.keys} == set(keys)
        for each, was in zip(after, before, strict=True):
            assert_same_bits(dict(each.sums), was)
        reducer.add(keys[0], partial_gradients(program, seed_of(*keys[0])))
        assert [each.keys for each in reducer.held()] == [{keys[0]}]

    run_ranks(ODD, plan, work)


def test_a_sum_that_one_micro_batch_is_half_in_holds_nothing():
    """W of the fast reducer adds in place: what it was stopped in spoils the whole sum."""
    plan = one_stage({0: 1, 1: 1}, 2, 2)

    def work(rank: int, groups: Mapping[str, Communicator]) -> None:
        program = expand(plan, rank)
        reducer = fast(ODD, plan, rank, groups)
        first, second = weights_run_by(plan, 0)[program.group.replica]
        reducer.add(first, partial_gradients(program, seed_of(*first)))
        assert [each.keys for each in reducer.held()] == [{first}]
        reducer.sums()
        assert reducer.held() == []
        reducer.added(second)
        assert [each.keys for each in reducer.held()] == [{first, second}]
        before = {name: tensor.clone() for name, tensor in reducer.held()[0].sums.items()}
        reducer.reduce()
        (after,) = reducer.held()
        assert_same_bits(dict(after.sums), before)
        reducer.sums()
        assert reducer.held() == []

    run_ranks(ODD, plan, work)
