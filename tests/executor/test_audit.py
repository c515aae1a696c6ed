"""Replicas compared over layouts: equal ones agree, one changed bit is named with its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from layouts import SMALL, idle_plan, job_of
from odd_model import ODD, logical, shards

from resihp.executor.adamw import AdamW
from resihp.executor.audit import differences, num_compared, row_of
from resihp.executor.state import Holding, TrainState, holding_of
from resihp.ir.expand import expand
from resihp.ir.model import Group, LayerRange, Mesh, Plan

LAST = SMALL.num_hidden_layers - 1
STATE = tuple(logical(seed) for seed in range(3))
for each in STATE:
    each["head"] = each["table"]  # tied


def layout_of(*replicas: Sequence[Sequence[int]]) -> Plan:
    """Of each replica the ranks of its stages, which cut the layers evenly."""
    mesh = Mesh(tp=4, pp=2, dp=len(replicas))
    groups: list[Group] = []
    for replica, stages in enumerate(replicas):
        size = (LAST + 1) // len(stages)
        for pp, ranks in enumerate(stages):
            last = LAST if pp == len(stages) - 1 else (pp + 1) * size - 1
            layers = (LayerRange(pp * size, last),)
            groups.append(Group(replica=replica, pp=pp, ranks=tuple(ranks), layers=layers))
    return idle_plan(mesh, groups)


def holdings_of(plan: Plan) -> dict[int, Holding]:
    found = dict[int, Holding]()
    for rank in plan.active_ranks:
        program = expand(plan, rank)
        parameters, mean, mean_sq = (shards(program, kind) for kind in STATE)
        optimizer = AdamW(job_of(plan.mesh).optimizer, parameters, exp_avg=mean, exp_avg_sq=mean_sq)
        found[rank] = holding_of(program, optimizer)
    return found


def found_in(plan: Plan, holdings: dict[int, Holding], version: dict[int, int] | None = None):
    rows = dict[int, list[int]]()
    for rank, holding in holdings.items():
        state = TrainState(job_of(plan.mesh))
        state.version = (version or {}).get(rank, 3)
        row = row_of(ODD, state, holding)
        rows[rank] = [value & (2**64 - 1) for value in row.tolist()]
    return list(differences(ODD, plan, rows))


EQUAL = layout_of([[0, 1], [2, 3]], [[4, 5], [6, 7]])
MIXED = layout_of([[0, 1, 2, 3], [8, 9]], [[4], [5, 6, 7, 10]])


@pytest.mark.parametrize("plan", [EQUAL, MIXED], ids=["equal", "mixed degrees"])
def test_equal_replicas_are_found_equal(plan: Plan):
    """[T15] At TP degrees 1, 2 and 4, with uneven shards, copies, replicated and tied tensors."""
    assert found_in(plan, holdings_of(plan)) == []


@pytest.mark.parametrize("kind", range(3), ids=["parameter", "first moment", "second moment"])
@pytest.mark.parametrize("name", ODD.tensors(0, 0))
def test_one_changed_bit_is_named_with_its_tensor_and_ranks(kind: int, name: str):
    """[T14] The last bit of one element on one rank of one replica."""
    holdings = holdings_of(EQUAL)
    tensor = holdings[5].kinds()[kind][name]
    tensor.view(-1).view(torch.int32)[-1] ^= 1
    found = found_in(EQUAL, holdings)
    what = ("parameter", "first moment", "second moment")[kind]
    assert found, "not seen"
    assert found[0].startswith(f"{what} {name}: ")
    assert "rank 5" in found[0] or "ranks 0, 1, 4 differs from that of rank 5" in found[0]


def test_groups_of_other_degrees_are_compared_as_a_whole():
    """Nobody has the same shard, so all ranks of both groups are named."""
    holdings = holdings_of(MIXED)
    holdings[2].parameters["0.heads"][0, 0] += 1.0
    (line,) = found_in(MIXED, holdings)
    assert line == "parameter 0.heads: that of ranks 0, 1, 2, 3 differs from that of rank 4"


def test_copies_inside_a_group_are_compared():
    """Two members hold the same key head: one replica is enough to see that they differ."""
    plan = layout_of([[0, 1, 2, 3], [4, 5]])
    holdings = holdings_of(plan)
    holdings[1].parameters["0.keys"][0, 0] += 1.0
    assert found_in(plan, holdings)[0] == (
        "parameter 0.keys: that of rank 0 differs from that of rank 1"
    )


def test_tied_tensors_are_compared_with_each_other():
    """The embedding and the head may lie on ranks that share nothing else."""
    plan = layout_of([[0, 1], [2, 3]])
    holdings = holdings_of(plan)
    holdings[0].parameters["table"][0, 0] += 1.0
    assert found_in(plan, holdings) == [
        "parameter table and its tied head: that of ranks 0, 1 differs from that of ranks 2, 3"
    ]


def test_only_shards_that_somebody_else_has_too_count_as_compared():
    """Of one replica what its members hold replicated; of two every shard of each degree."""
    names = ODD.tensors(0, LAST)
    replicated = [name for name in names if ODD.layout(name).dim is None]
    sharded = len(names) - len(replicated)
    assert sharded
    alone = layout_of([[0, 1]])
    assert num_compared(ODD, alone) == 3 * len(replicated)
    equal = layout_of([[0, 1]], [[2, 3]])
    assert num_compared(ODD, equal) == 3 * (len(replicated) + 2 * sharded)
    mixed = layout_of([[0, 1]], [[2]])
    assert num_compared(ODD, mixed) == 3 * (len(replicated) + 3 * sharded)
    assert num_compared(ODD, layout_of([[0]])) == 0


def test_counts_are_compared():
    """[T14] A rank that is a step ahead also has another learning rate."""
    found = found_in(EQUAL, holdings_of(EQUAL), version={6: 4})
    assert [line.split(":")[0] for line in found] == ["version", "learning rate"]
    assert found[0] == "version: that of ranks 0, 1, 2, 3, 4, 5, 7 differs from that of rank 6"
    holdings = holdings_of(EQUAL)
    holdings[3].optimizer.num_steps = 9
    assert "updates of the optimizer" in found_in(EQUAL, holdings)[0]
