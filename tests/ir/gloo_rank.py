"""A short interpreter: what one rank of a plan really does, on gloo.

Sends and receives are posted in the order of the stream, all of a pair of ranks with one tag: gloo
matches them by their order, so a plan whose ends disagree trains on wrong tensors, as it would on
any FIFO. The rank waits where a tensor is used. It trusts the plan: what a plan gets wrong becomes
a `KeyError` or another error, a hang, or another gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from gloo_model import Kept, Layer, first_input, loss_gradient, sizes_of, stacked
from plan_oracle import stages_of
from torch import Tensor

from resihp.ir.model import GroupName, Instr, Op, Plan

PIPELINE_TAG, TP_TAG, STEP_TAG, REDUCE_TAG = 0, 1, 2, 3
"""Those of the reductions are `REDUCE_TAG` + stage."""


class MicroBatch(NamedTuple):
    stage: int
    home: int
    number: int


class Arriving(NamedTuple):
    """A posted receive."""

    pieces: list[Tensor]
    works: list[Any]
    """Those not waited for yet: gloo would wait for ever for one a second time."""


class Wire:
    """Messages between ranks. `wait` is called with everything that is waited for."""

    def __init__(self, group: Any, me: int, wait: Callable[[Any], None]) -> None:
        self.group, self.me, self.wait = group, me, wait

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        return self.group.send([tensor.contiguous()], to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        return self.group.recv([tensor], source, tag)

    def exchange(self, members: Sequence[int], mine: Tensor, tag: int) -> list[Tensor]:
        """Everybody's tensor, in the order of the members, once all have come."""
        everybodys = [mine if rank == self.me else torch.empty_like(mine) for rank in members]
        others = [(r, t) for r, t in zip(members, everybodys, strict=True) if r != self.me]
        works = [self.send(mine, rank, tag) for rank, _ in others]
        works += [self.receive(tensor, rank, tag) for rank, tensor in others]
        for work in works:
            self.wait(work)
        return everybodys


class Rank:
    """One rank of `plan`; `numbers` are the processes of the plan's ranks."""

    def __init__(self, plan: Plan, rank: int, numbers: dict[int, int], wire: Wire) -> None:
        group = plan.group_of(rank)
        assert group is not None
        self.plan, self.group, self.wire = plan, group, wire
        self.member = group.ranks.index(rank)
        self.numbers = numbers
        self.sizes = sizes_of(plan)
        self.positions = {stage: pp for pp, held in stages_of(plan).items() for stage in held}
        self.stages = stages_of(plan)[group.pp]
        self.layers = {
            stage: [
                Layer(self.sizes, layer, self.member, group.tp)
                for layer in range(held.first, held.last + 1)
            ]
            for stage, held in zip(self.stages, group.layers, strict=True)
        }
        self.body = next(
            s.body for s in plan.streams if s.pp == group.pp and group.replica in s.replicas
        )
        self.kept: dict[MicroBatch, list[Kept]] = {}
        self.losses: dict[MicroBatch, Tensor] = {}
        self.weight_work: dict[MicroBatch, list[tuple[Tensor, ...]]] = {}
        self.made: dict[tuple[str, MicroBatch], Tensor] = {}
        """Outputs, by the micro-batch and stage that use them."""
        self.chunks: dict[tuple[str, MicroBatch], list[Tensor]] = {}
        self.arriving: dict[tuple[str, MicroBatch], Arriving] = {}
        self.joined: dict[tuple[str, MicroBatch], Tensor] = {}
        self.sends: list[Any] = []
        self.receives: list[Arriving] = []
        self.alive: list[Tensor] = []
        """What posted sends still need."""
        self.reduced: dict[int, Tensor] = {}
        self.at_step: dict[int, Tensor] = {}

    def run(self, progress: Callable[[int], None]) -> dict[int, Tensor]:
        """The gradient of every stage as the step found it."""
        at = 0
        while at < len(self.body):
            progress(at)
            pair = self.body[at : at + 2] if self.body[at].paired else self.body[at : at + 1]
            self._do(pair)
            at += len(pair)
        progress(at)
        for work in self.sends:
            self.wire.wait(work)
        for arriving in self.receives:
            self._wait_for(arriving)
        return self.at_step

    def _do(self, instrs: Sequence[Instr]) -> None:
        op = instrs[0].op
        if op.is_compute:
            inputs = [self._input(instr) for instr in instrs]
            for instr, tensor in zip(instrs, inputs, strict=True):
                self._compute(instr.op, self._micro_batch(instr), tensor)
        elif op is Op.STEP:
            everybody = sorted(self.numbers.values())
            self.wire.exchange(everybody, torch.zeros(1), STEP_TAG)
            self.at_step = dict(self.reduced)
        elif op is Op.REDUCE_GRADS:
            self._reduce(self._stage(instrs[0]))
        elif op.has_micro_batch:
            verb, kind = op.mnemonic.split("_")
            getattr(self, f"_{verb}")(kind, instrs[0], self._micro_batch(instrs[0]))

    def _stage(self, instr: Instr) -> int:
        return self.stages[0] if instr.stage is None else instr.stage

    def _micro_batch(self, instr: Instr) -> MicroBatch:
        home = self.group.replica if instr.home is None else instr.home
        assert instr.microbatch is not None
        return MicroBatch(self._stage(instr), home, instr.microbatch)

    # --- computing

    def _add_up(self, part: Tensor) -> Tensor:
        members = [self.numbers[rank] for rank in self.group.ranks]
        return torch.stack(self.wire.exchange(members, part, TP_TAG)).sum(0)

    def _input(self, instr: Instr) -> Tensor | None:
        """What a computation needs from another one; waits for it."""
        micro_batch = self._micro_batch(instr)
        last = len(self.positions) - 1
        if instr.op is Op.W or micro_batch.stage == (0 if instr.op is Op.F else last):
            return None
        what = ("act" if instr.op is Op.F else "grad", micro_batch)
        if what in self.joined:
            return self.joined.pop(what)
        if what in self.arriving:
            (whole,) = self._wait_for(self.arriving.pop(what))
            return whole
        return self.made[what]

    def _compute(self, op: Op, micro_batch: MicroBatch, tensor: Tensor | None) -> None:
        if op is Op.F:
            self._forward(micro_batch, tensor)
        if op in (Op.B, Op.BW):
            self._backward(micro_batch, tensor)
        if op in (Op.W, Op.BW):
            for layer, work in zip(
                self.layers[micro_batch.stage], self.weight_work.pop(micro_batch), strict=True
            ):
                layer.weight(*work)

    def _forward(self, micro_batch: MicroBatch, x_TD: Tensor | None) -> None:
        number = micro_batch.home * self.plan.batch.microbatches + micro_batch.number
        x_TD = first_input(self.sizes, number) if x_TD is None else x_TD
        kept: list[Kept] = []
        for layer in self.layers[micro_batch.stage]:
            x_TD, of_layer = layer.forward(x_TD, self._add_up)
            kept.append(of_layer)
        self.kept[micro_batch] = kept
        after = micro_batch._replace(stage=micro_batch.stage + 1)
        if after.stage in self.positions:
            self.made["act", after] = x_TD
        else:
            self.losses[micro_batch] = loss_gradient(self.sizes, number, x_TD)

    def _backward(self, micro_batch: MicroBatch, grad_TD: Tensor | None) -> None:
        kept = self.kept.pop(micro_batch)
        grad_TD = self.losses.pop(micro_batch) if grad_TD is None else grad_TD
        works: list[tuple[Tensor, ...]] = []
        for layer, of_layer in zip(
            reversed(self.layers[micro_batch.stage]), reversed(kept), strict=True
        ):
            grad_TD, work = layer.backward(of_layer, grad_TD, self._add_up)
            works.append(work)
        self.weight_work[micro_batch] = works[::-1]
        self.made["grad", micro_batch._replace(stage=micro_batch.stage - 1)] = grad_TD

    def _reduce(self, stage: int) -> None:
        """Sum over all members of all groups that hold the stage; each gives what it holds."""
        mine = stacked([(layer.grad_up_FD, layer.grad_down_DF) for layer in self.layers[stage]])
        holders = [
            self.numbers[rank]
            for group in sorted(self.plan.groups, key=lambda group: group.name)
            if group.pp == self.group.pp
            for rank in group.ranks
        ]
        everybodys = self.wire.exchange(holders, mine, REDUCE_TAG + stage)
        self.reduced[stage] = torch.stack(everybodys).sum(0)

    # --- communicating

    def _far_ranks(self, instr: Instr, stage: int) -> tuple[int, ...]:
        replica = self.group.replica if instr.peer is None else instr.peer
        name = GroupName(replica, self.positions[stage])
        return next(group.ranks for group in self.plan.groups if group.name == name)

    def _far(self, kind: str, micro_batch: MicroBatch, step: int) -> MicroBatch:
        """The micro-batch at the stage that makes (-1) or uses (1) the tensor."""
        step = step if kind == "act" else -step
        return micro_batch._replace(stage=micro_batch.stage + step)

    def _scatter(self, kind: str, instr: Instr, micro_batch: MicroBatch) -> None:
        """Cut; how many chunks there are depends on the receiver, which the send names."""
        what = kind, self._far(kind, micro_batch, 1)
        self.chunks[what] = [self.made[what]]

    def _send(self, kind: str, instr: Instr, micro_batch: MicroBatch) -> None:
        what = kind, self._far(kind, micro_batch, 1)
        there = self._far_ranks(instr, what[1].stage)
        if what in self.chunks:
            num_chunks = max(self.group.tp, len(there))
            whole = self.made[what]
            if len(whole) % num_chunks:
                raise ValueError(f"{len(whole)} tokens do not make {num_chunks} chunks")
            for chunk, piece in enumerate(whole.chunk(num_chunks)):
                if chunk * self.group.tp // num_chunks == self.member:
                    self._post_send(piece, there[chunk * len(there) // num_chunks])
        elif self.group.tp != len(there):
            raise ValueError("a whole tensor between unequal degrees")
        else:
            self._post_send(self.made[what], there[self.member])

    def _post_send(self, piece: Tensor, rank: int) -> None:
        self.alive.append(piece.contiguous())
        self.sends.append(self.wire.send(self.alive[-1], self.numbers[rank], PIPELINE_TAG))

    def _wait_for(self, arriving: Arriving) -> list[Tensor]:
        for work in arriving.works:
            self.wire.wait(work)
        arriving.works.clear()
        return arriving.pieces

    def _recv(self, kind: str, instr: Instr, micro_batch: MicroBatch) -> None:
        there = self._far_ranks(instr, self._far(kind, micro_batch, -1).stage)
        gather = Op.GATHER_ACT if kind == "act" else Op.GATHER_GRAD
        is_cut = any(i.op is gather and self._micro_batch(i) == micro_batch for i in self.body)
        num_chunks = max(self.group.tp, len(there)) if is_cut else self.group.tp
        if not is_cut and self.group.tp != len(there):
            raise ValueError("a whole tensor between unequal degrees")
        num_tokens = self.sizes.tokens // num_chunks if is_cut else self.sizes.tokens
        arriving = Arriving([], [])
        for chunk in range(num_chunks):
            if chunk * self.group.tp // num_chunks == self.member:
                piece = torch.empty(num_tokens, self.sizes.hidden, dtype=torch.float64)
                source = self.numbers[there[chunk * len(there) // num_chunks]]
                arriving.pieces.append(piece)
                arriving.works.append(self.wire.receive(piece, source, PIPELINE_TAG))
        self.receives.append(arriving)
        self.arriving[kind, micro_batch] = arriving

    def _gather(self, kind: str, instr: Instr, micro_batch: MicroBatch) -> None:
        pieces = self._wait_for(self.arriving.pop((kind, micro_batch)))
        members = [self.numbers[rank] for rank in self.group.ranks]
        parts = self.wire.exchange(members, torch.cat(pieces), TP_TAG)
        self.joined[kind, micro_batch] = torch.cat(parts)
