"""All replicas of every tensor compared at one version, between two iterations (DESIGN §6).

Each rank sums its shards of parameters and moments (`checksum`), all exchange their sums, and
everybody finds the same differences. Sums of shards add up, so groups of different TP degrees are
compared as well as equal ones. The sums travel with the version, the number of updates, that on
which the optimizer's bias correction depends, and the bits of the next learning rate; random
numbers are keyed by step, micro-batch and layer, so there is no state of theirs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from resihp.errors import CommError
from resihp.executor.boundary import Ask
from resihp.executor.checksum import shard_sum
from resihp.executor.device.interface import Communicator, Device
from resihp.executor.flat import upload
from resihp.executor.layouts import TensorLayout, num_copies, shard_units
from resihp.executor.model import Model
from resihp.executor.state import Holding, TrainState
from resihp.ir.model import Group, Plan
from resihp.ir.reshard import layers_of
from resihp.wire.messages import Audited, Message

__all__ = ["Audit", "differences", "num_compared", "row_of"]

KINDS = ("parameter", "first moment", "second moment")
_NUMBERS = ("version", "updates", "updates of the optimizer", "learning rate")
_MASK = (1 << 64) - 1


def row_of(model: Model, state: TrainState, holding: Holding) -> Tensor:
    """What a rank brings: its four numbers, then the sums of all tensors of the model, [kinds] of
    each, zeros where it holds none; int64 on the device of its tensors."""
    program = holding.program
    device = next(iter(holding.parameters.values())).device
    (rate,) = struct.unpack("<q", struct.pack("<d", state.learning_rate(state.version)))
    numbers = [state.version, state.updates, holding.optimizer.num_steps, rate]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    sums: list[Tensor] = []
    for name in model.tensors(0, model.num_layers - 1):
        layout = model.layout(name)
        if name not in holding.parameters:
            sums += [zero] * len(KINDS)
            continue
        start = 0
        if layout.dim is not None:
            first, _ = shard_units(layout.units, program.tp, program.tp_index)
            start = first * (layout.shape[layout.dim] // layout.units)
        sums += [shard_sum(kind[name], layout, start) for kind in holding.kinds()]
    return torch.cat([upload(torch.tensor(numbers), device), torch.stack(sums)])


def differences(model: Model, plan: Plan, rows: Mapping[int, Sequence[int]]) -> Iterator[str]:
    """Every tensor whose replicas are not equal, with the ranks that differ; `rows` by rank."""
    ranks = sorted(rows)
    for place, what in enumerate(_NUMBERS):
        yield from _unequal(what, {(rank,): rows[rank][place] for rank in ranks})
    groups = _holders(plan)
    totals: dict[tuple[str, int], dict[tuple[int, ...], int]] = {}
    at = len(_NUMBERS)
    for name in model.tensors(0, model.num_layers - 1):
        layout, holders = model.layout(name), groups[model.layer_of(name)]
        places = _places(layout, holders)
        for kind, what in enumerate(KINDS):
            sums = {rank: row[at] for rank, row in rows.items()}
            of_groups = {group.ranks: _total(layout, group, sums) for group in holders}
            yield from _of_tensor(f"{what} {name}", places, sums, of_groups)
            totals[name, kind] = of_groups
            at += 1
    for pair in model.tied:
        for kind, what in enumerate(KINDS):
            one, other = (totals[name, kind] for name in pair)
            yield from _unequal(f"{what} {pair[0]} and its tied {pair[1]}", {**other, **one})


def num_compared(model: Model, plan: Plan) -> int:
    """How many shards, of parameters and of both moments, have another holder to compare with."""
    groups, num = _holders(plan), 0
    for name in model.tensors(0, model.num_layers - 1):
        holders = groups[model.layer_of(name)]
        places = _places(model.layout(name), holders)
        num += sum(len(holders) > 1 or len(ranks) > 1 for ranks in places.values())
    return num * len(KINDS)


def _holders(plan: Plan) -> dict[int, list[Group]]:
    """The groups that hold each layer."""
    groups: dict[int, list[Group]] = {}
    for group in plan.groups:
        for layer in layers_of(group):
            groups.setdefault(layer, []).append(group)
    return groups


def _places(
    layout: TensorLayout, holders: Sequence[Group]
) -> dict[tuple[int, int, int], list[int]]:
    """The ranks that hold the same of a tensor, by TP degree and units."""
    places: dict[tuple[int, int, int], list[int]] = {}
    for group in holders:
        for index, rank in enumerate(group.ranks):
            # Members with the same units hold the same, in this group and in those of its degree.
            if layout.dim is None:
                place = (1, 0, 1)
            else:
                place = (group.tp, *shard_units(layout.units, group.tp, index))
            places.setdefault(place, []).append(rank)
    return places


def _of_tensor(
    what: str,
    places: Mapping[tuple[int, int, int], Sequence[int]],
    sums: Mapping[int, int],
    totals: Mapping[tuple[int, ...], int],
) -> Iterator[str]:
    """`sums` by rank, `totals` by the ranks of each group."""
    found = [
        line
        for place in sorted(places)
        for line in _unequal(what, {(rank,): sums[rank] for rank in places[place]})
    ]
    if not found:  # else it has been said more exactly
        found = list(_unequal(what, totals))
    yield from found


def _total(layout: TensorLayout, group: Group, sums: Mapping[int, int]) -> int:
    """The whole tensor's sum in one group; of copies the first counts."""
    step = group.tp if layout.dim is None else num_copies(layout, group.tp)
    return sum(sums[rank] for rank in group.ranks[::step]) & _MASK


def _unequal(what: str, values: Mapping[tuple[int, ...], int]) -> Iterator[str]:
    """A line where not all have the same value: who differs from what most have."""
    if len(set(values.values())) < 2:
        return
    by_value: dict[int, list[tuple[int, ...]]] = {}
    for ranks, value in values.items():
        by_value.setdefault(value, []).append(ranks)
    sides = sorted(by_value.values(), key=lambda side: (-len(side), side))
    yield f"{what}: " + " differs from ".join(_listed(side) for side in sides)


def _listed(side: Sequence[tuple[int, ...]]) -> str:
    ranks = sorted({rank for each in side for rank in each})
    return f"that of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Audit:
    """A duty of the boundary: every `every` steps (0: never) and where all agreed on it."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        state: TrainState,
        device: Device,
        world: Communicator,
        send: Callable[[Message], None],
        *,
        generation: int,
        every: int,
    ) -> None:
        self._model = model
        self._plan = plan
        self._state = state
        self._device = device
        self._world = world
        self._send = send
        self._generation = generation
        self._every = every

    async def cross(self, version: int, agreed: Ask) -> None:
        """Compare, and tell the coordinator. CommError where replicas differ: it ends the job."""
        is_due = self._every > 0 and version % self._every == 0
        if not (is_due or Ask.AUDIT in agreed):
            return
        made = self._device.compute.submit(self._row)
        exchanged = self._device.comm.submit(
            lambda: self._world.all_gather(made.wait()).cpu().numpy(), waits=[made]
        )
        rows: NDArray[np.int64] = await exchanged.wait_async()
        table = {
            rank: [int(value) & _MASK for value in row]
            for rank, row in zip(self._world.ranks, rows, strict=True)
        }
        found = tuple(differences(self._model, self._plan, table))
        self._send(
            Audited(
                generation=self._generation,
                version=version,
                differing=found[:8],
                num_shards=num_compared(self._model, self._plan),
            )
        )
        if found:
            raise CommError(f"replicas differ at version {version}: {found[0]}")

    def _row(self) -> Tensor:
        holding = self._state.current
        assert holding is not None
        return row_of(self._model, self._state, holding)
