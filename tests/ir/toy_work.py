"""The small model of `toy_model` as work of the real interpreter, and a wire that matches by order.

In float64, so that a plan's gradient is the reference's to many digits or it is another one. What a
plan gets wrong becomes an error, a hang, or another gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from run_work import Site, generation, run_work
from torch import Tensor
from toy_model import Kept, Layer, first_input, loss_gradient, sizes_of, stacked

from resihp.errors import CommError
from resihp.executor.device.interface import Groups, Tag, Wire
from resihp.executor.session import in_thread
from resihp.executor.stream import Event
from resihp.executor.work import Key
from resihp.ir.expand import expand
from resihp.ir.model import Plan
from resihp.ir.program import Program, TensorType
from resihp.wire.messages import StepRecord

Place = tuple[int, Key]
"""(stage, micro-batch)."""


class WireInOrder:
    """Messages between two ranks meet in the order in which both ends list them, as on NCCL.

    The wire below matches by tag; here the tag is the number of the message. So a plan whose ends
    disagree gets another tensor, as it would on any FIFO.
    """

    def __init__(self, below: Wire) -> None:
        self._below = below
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def send(
        self, peer: int, tag: Tag, source: Event, cut: Callable[[Any], Any] | None = None
    ) -> Event:
        return self._below.send(peer, self._next(self._sent, peer), source, cut)

    def receive(self, peer: int, tag: Tag, num_bytes: int) -> Event:
        return self._below.receive(peer, self._next(self._received, peer), num_bytes)

    @staticmethod
    def _next(counter: Counter[int], peer: int) -> Tag:
        counter[peer] += 1
        return Tag(kind=0, step=counter[peer], stage=0, home=0, microbatch=0, chunk=0)


class ToyWork:
    """See `resihp.executor.work.Work`."""

    def __init__(self, plan: Plan, program: Program, groups: Groups) -> None:
        """Builds its groups; in a thread."""
        self.program = program
        self.sizes = sizes_of(plan)
        self.num_per_replica = plan.batch.microbatches
        self.layers = {
            stage: [
                Layer(self.sizes, layer, program.tp_index, program.tp)
                for layer in range(held.first, held.last + 1)
            ]
            for stage, held in zip(program.stages, program.layers, strict=True)
        }
        mine = plan.group_of(program.rank)
        assert mine is not None
        self.world = groups.build("world", plan.active_ranks)
        self.tp = groups.build(f"tp.{mine.name}", mine.ranks)
        self.gathering = groups.build(f"gather.{mine.name}", mine.ranks)
        self.holders = groups.build(f"holders.{mine.pp}", holders_of(plan, mine.pp))
        self.kept: dict[Place, list[Kept]] = {}
        self.losses: dict[Place, Tensor] = {}
        self.weight_work: dict[Place, list[tuple[Tensor, ...]]] = {}
        self.reduced: dict[int, Tensor] = {}
        self.at_step: dict[int, Tensor] = {}

    def begin(self, step: int) -> None:
        self.discard()

    def forward(self, stage: int, key: Key, x: Tensor | None) -> Tensor | None:
        number = key[0] * self.num_per_replica + key[1]
        x_TD = first_input(self.sizes, number) if x is None else x
        kept: list[Kept] = []
        for layer in self.layers[stage]:
            x_TD, of_layer = layer.forward(x_TD, self._add_up)
            kept.append(of_layer)
        self.kept[stage, key] = kept
        if stage + 1 < self.program.num_stages:
            return x_TD.contiguous()
        self.losses[stage, key] = loss_gradient(self.sizes, number, x_TD)
        return None

    def backward_input(self, stage: int, key: Key, dy: Tensor | None) -> Tensor | None:
        kept = self.kept.pop((stage, key))
        grad_TD = self.losses.pop((stage, key)) if dy is None else dy
        works: list[tuple[Tensor, ...]] = []
        for layer, of_layer in zip(reversed(self.layers[stage]), reversed(kept), strict=True):
            grad_TD, work = layer.backward(of_layer, grad_TD, self._add_up)
            works.append(work)
        self.weight_work[stage, key] = works[::-1]
        return grad_TD.contiguous() if stage else None

    def backward_weight(self, stage: int, key: Key) -> None:
        works = self.weight_work.pop((stage, key))
        for layer, work in zip(self.layers[stage], works, strict=True):
            layer.weight(*work)

    def num_bytes(self, tensor: TensorType) -> int:
        return 8 * tensor.tokens * tensor.hidden

    def chunk(self, payload: Tensor, chunk: int, num_chunks: int) -> Tensor:
        if len(payload) % num_chunks:
            raise CommError(f"{len(payload)} tokens do not make {num_chunks} chunks")
        return payload.chunk(num_chunks)[chunk]

    def arrived(self, raw: Any, num_chunks: int) -> Tensor:
        return torch.frombuffer(raw, dtype=torch.float64).view(-1, self.sizes.hidden)

    def gather(self, stage: int, chunks: Sequence[Tensor]) -> Tensor:
        return self.gathering.all_gather(torch.cat(list(chunks))).flatten(0, 1)

    def reduce(self, stage: int) -> None:
        mine = stacked([(layer.grad_up_FD, layer.grad_down_DF) for layer in self.layers[stage]])
        self.reduced[stage] = self.holders.all_gather(mine).sum(0)

    def vote(self) -> None:
        self.world.all_gather(torch.zeros(1))

    def apply(self) -> None:
        self.at_step = dict(self.reduced)

    def record(self) -> StepRecord:
        return StepRecord.empty(0)

    def discard(self) -> None:
        for held in (self.kept, self.losses, self.weight_work, self.reduced):
            held.clear()
        for layer in (layer for layers in self.layers.values() for layer in layers):
            layer.grad_up_FD.zero_()
            layer.grad_down_DF.zero_()

    def _add_up(self, part: Tensor) -> Tensor:
        whole = part.clone()
        self.tp.all_reduce_(whole)
        return whole


def holders_of(plan: Plan, pp: int) -> tuple[int, ...]:
    """All ranks that hold the stages of a position."""
    groups = sorted(plan.groups, key=lambda group: group.name)
    return tuple(rank for group in groups if group.pp == pp for rank in group.ranks)


async def toy_crew(site: Site) -> dict[int, list[float]]:
    """One iteration; the gradient of every stage as the step found it."""
    async with generation(site) as groups:
        program = expand(site.plan, site.rank)
        work = await in_thread(lambda: ToyWork(site.plan, program, groups))
        await run_work(site, program, work, 1, wire=WireInOrder)
    return {stage: gradient.tolist() for stage, gradient in work.at_step.items()}
