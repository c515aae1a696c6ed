"""The reduction: the same bits whoever computed what, over whatever TP degrees."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from cases import assert_same_bits
from layouts import MODEL, SMALL, logical_tensors, one_stage, shards_of
from sums import combine_replicas
from torch import Tensor

from resihp.executor.gradients import GradientTree
from resihp.executor.reduce import Reducer, hosted_nodes, reduce_groups, run_by
from resihp.ir.expand import expand
from resihp.ir.model import Plan
from resihp.ir.program import Program

FAR_S = 30.0


class Exchange:
    """One group of threads that exchange tensors as the members of a real group do."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._barrier = threading.Barrier(len(ranks), timeout=FAR_S)
        self._slots: list[object] = [None] * len(ranks)

    def swap(self, index: int, mine: object) -> list[object]:
        """What every member put in, in member order."""
        self._slots[index] = mine
        self._barrier.wait()
        all_of_them = list(self._slots)
        self._barrier.wait()
        return all_of_them


class ThreadCommunicator:
    """`Communicator` between threads, which checks what gloo would trust."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        self._exchange = exchange
        self.ranks = exchange.ranks
        self.index = index
        self.degree = len(exchange.ranks)

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.stack(self._exchange.swap(self.index, part.clone()))  # type: ignore[arg-type]

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        table = self._exchange.swap(self.index, [part.clone() for part in parts])
        received = [row[self.index] for row in table]  # type: ignore[index]
        assert [part.numel() for part in received] == list(sizes)
        return received


def gradients(replica: int, number: int) -> dict[str, Tensor]:
    """The logical gradient of one micro-batch."""
    return logical_tensors(1000 * replica + number, scale_by_magnitude=True)


def reduced_by_one(num_replicas: int, num_microbatches: int) -> dict[str, Tensor]:
    """The oracle: one rank that computed everything, with whole tensors."""
    tree = GradientTree(num_replicas, num_microbatches)
    for replica in range(num_replicas):
        for number in range(num_microbatches):
            tree.add(replica, number, gradients(replica, number))
    return combine_replicas([tree.take(replica) for replica in range(num_replicas)])


def reduced_by_all(plan: Plan) -> dict[int, dict[str, Tensor]]:
    """By rank, with every rank of the stage on a thread of its own."""
    mesh, num_microbatches = plan.mesh, plan.batch.microbatches
    programs = {rank: expand(plan, rank) for rank in plan.active_ranks}
    nodes = {
        rank: hosted_nodes(run_by(program), mesh.dp, num_microbatches)
        for rank, program in programs.items()
    }
    exchanges = {group.chunk: Exchange(group.ranks) for group in reduce_groups(plan, 0)}
    results: dict[int, dict[str, Tensor]] = {}
    errors: list[BaseException] = []

    def work(program: Program) -> None:
        mine = {
            chunk: ThreadCommunicator(exchange, exchange.ranks.index(program.rank))
            for chunk, exchange in exchanges.items()
            if program.rank in exchange.ranks
        }
        reducer = Reducer(MODEL, plan, program, mine, nodes)  # type: ignore[arg-type]
        tree = GradientTree(mesh.dp, num_microbatches)
        for home, number in run_by(program):
            tree.add(home, number, shards_of(program, gradients(home, number)))
        like = shards_of(program, gradients(0, 0))
        try:
            results[program.rank] = reducer.reduce(tree, like)
            assert tree.num_partials == 0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(p,)) for p in programs.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize(
    ("degrees", "num_replicas"),
    [
        ({0: 1}, 1),
        ({0: 2}, 1),
        ({0: 1, 1: 1}, 2),
        ({0: 2, 1: 2}, 2),
        ({0: 2, 1: 1}, 2),
        ({0: 1, 1: 2}, 2),
        ({0: 1, 1: 1, 2: 2}, 3),
        ({0: 4, 1: 1, 2: 2}, 3),
        ({1: 2}, 2),
        ({0: 1, 2: 2}, 3),
        ({1: 1, 2: 4, 3: 2}, 4),
        ({0: 2, 3: 1}, 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_microbatches", [1, 3, 4])
def test_the_bits_do_not_depend_on_who_ran_what(
    degrees: dict[int, int], num_replicas: int, num_microbatches: int
):
    """Unequal degrees and dropped replicas give what one rank alone would have."""
    plan = one_stage(degrees, num_replicas, num_microbatches)
    expected = reduced_by_one(num_replicas, num_microbatches)
    results = reduced_by_all(plan)
    assert results.keys() == set(plan.active_ranks)
    for rank, reduced in results.items():
        assert_same_bits(reduced, shards_of(expand(plan, rank), expected))


def test_the_order_of_additions_matters_for_these_gradients():
    """Otherwise the test above could not fail."""
    parts = [gradients(replica, number) for replica in (0, 1) for number in (0, 1, 2)]
    name = "model.layers.0.mlp.up_proj.weight"
    plain = sum(part[name] for part in parts)
    assert isinstance(plain, Tensor)
    assert not torch.equal(plain, reduced_by_one(2, 3)[name])


def test_each_chunk_is_reduced_by_one_member_of_each_replica():
    """In order of replica; a member of a smaller group holds several chunks."""
    plan = one_stage({0: 4, 1: 1, 2: 2}, 3, 1)
    assert [(g.chunk, g.num_chunks, g.ranks) for g in reduce_groups(plan, 0)] == [
        (0, 4, (0, 4, 8)),
        (1, 4, (1, 4, 8)),
        (2, 4, (2, 4, 9)),
        (3, 4, (3, 4, 9)),
    ]


def test_every_micro_batch_is_in_one_hosted_node():
    """What the members expect of each other covers the global batch exactly once."""
    plan = one_stage({0: 1, 2: 1}, 3, 5)
    leaves: list[tuple[int, int]] = []
    for rank in plan.active_ranks:
        for home, node in hosted_nodes(run_by(expand(plan, rank)), 3, 5):
            first = node.number << node.level
            leaves += [(home, n) for n in range(first, min(first + (1 << node.level), 5))]
    assert sorted(leaves) == [(home, n) for home in range(3) for n in range(5)]


def test_the_model_cuts_into_four():
    """The layouts above need it."""
    assert SMALL.num_key_value_heads % 4 == 0
