"""Bytes of a LLaMA on one member of a TP group, as the executor keeps them.

Resident bytes of a parameter:

|                                  | fp32 | bf16 |
|----------------------------------|------|------|
| what F and B read                |  4   |  2   |
| master copy that AdamW updates   |  -   |  4   |
| both moments                     |  8   |  8   |
| reduced gradient                 |  4   |  4   |
| sums of gradients, each          |  4   |  4   |

In fp32 gradients are added along a fixed tree, so that bits do not depend on who computed what,
and several sums are alive at once (`peak_partials`). In bf16 there is one, in fp32: 22 bytes.

Sizes: D hidden size, and of one member E head size, H query heads, K key/value heads, F
feed-forward columns, V rows of the tables. Where these do not divide, members hold near-equal
runs, and the sizes are those of the longest; where there are more members than key/value heads,
each holds a copy of one. Norms are whole on every member. Tied tables are two, which stay equal.
(Biases, which a plan does not know of, are not counted: 0.01 % of a Qwen2.5.)

Kept per token and layer of a micro-batch:

| from F to B | queries H E, keys and values 2 K E, attention output H E and its log-sum-exp H, gate
|             | and up 2 F |
| from F to W | both residual inputs 2 D and their reciprocal norms 2, both normed inputs 2 D, mixed
|             | heads H E, gated product F (silu of the gate until B) |
| from B to W | gradients of queries H E, keys and values 2 K E, gate and up 2 F, both row-parallel
|             | outputs 2 D, both norms 2 D |

Each stage adds the rotary tables E (F to B); the last one its final norm (input D, reciprocal 1,
output D, gradient D), the log-probabilities V and loss gradients 1 (F to B; where members share
the vocabulary a scale 1 more), and the gradient of the logits V (B to W); the first one the
gradient of the embedded tokens D (B to W). What lives only inside one instruction is not counted.

A stage that computes its forward again keeps only its input D from F to B; the first one, whose
input is token numbers, nothing. B then has all of the tables above at once.

In bf16 all of these are bf16, but for log-sum-exps, reciprocal norms, rotary tables,
log-probabilities and loss gradients, which stay fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from resihp.ir.facts import Facts, StageFacts
from resihp.ir.model import (
    Batch,
    Group,
    GroupName,
    LayerRange,
    MicroBatch,
    ModelShape,
    Op,
    Plan,
    Precision,
    Stream,
)
from resihp.ir.placement import Placement, placement_of
from resihp.ir.reshard import ShardLoad, ShardMove

__all__ = [
    "FP32_BYTES",
    "PARAMETER_BYTES",
    "facts_of",
    "move_bytes",
    "num_parameters",
    "peak_partials",
    "sharded_parameters",
    "stage_facts",
    "whole_parameters",
]

FP32_BYTES = 4
_SHARED_LOSS_BYTES = 4
"""Of a token: the fp32 scale of its exponentials."""
PARAMETER_BYTES: dict[Precision, int] = {"fp32": 16, "bf16": 18}
"""Resident for each parameter beside the sums of gradients."""


def facts_of(plan: Plan) -> Facts:
    """Sizes of every group of `plan`, verified or not."""
    placement = placement_of(plan)
    partials: dict[GroupName, dict[int, int]] = {}
    # In bf16 there is one sum, whatever the order.
    for stream in plan.streams if plan.precision == "fp32" else ():
        peaks = _partials_of(plan, placement, stream)
        for replica in stream.replicas:
            partials.setdefault(GroupName(replica, stream.pp), peaks)

    @cache
    def sizes(layers: LayerRange, tp: int, num_partials: int, again: bool) -> StageFacts:
        return stage_facts(
            plan.model, plan.batch, layers, tp, num_partials, plan.precision, recomputes=again
        )

    def of_group(group: Group) -> Iterator[StageFacts]:
        stages, sums = placement.stages[group.pp], partials.get(group.name, {})
        for at, layers in enumerate(group.layers):
            again = at < len(stages) and stages[at] in plan.recompute
            yield sizes(layers, group.tp, sums.get(at, 1), again)

    return Facts(stages={group.name: tuple(of_group(group)) for group in plan.groups})


def stage_facts(
    model: ModelShape,
    batch: Batch,
    layers: LayerRange,
    tp: int,
    num_partials: int,
    precision: Precision = "fp32",
    *,
    recomputes: bool = False,
) -> StageFacts:
    """Sizes of one member of a group of degree `tp` that holds `layers`.

    `num_partials` sums of gradients are resident in fp32 (`peak_partials`), one in bf16.
    """
    kept = _kept(model, layers, tp, 4 if precision == "fp32" else 2)
    of_f = kept.until_b + kept.until_w
    if recomputes:
        of_f = 0 if layers.first == 0 else kept.boundary
    again = kept.until_b + kept.until_w - of_f
    num_sums = num_partials if precision == "fp32" else 1
    per_parameter = PARAMETER_BYTES[precision] + num_sums * FP32_BYTES
    return StageFacts(
        state_bytes=num_parameters(model, layers, tp) * per_parameter,
        activation_bytes=of_f * batch.tokens,
        released_by_b_bytes=kept.until_b * batch.tokens,
        weight_input_grad_bytes=(kept.from_b + again) * batch.tokens,
        boundary_bytes=kept.boundary * batch.tokens,
    )


class _Kept(NamedTuple):
    """Bytes of a token."""

    until_b: int
    until_w: int
    from_b: int
    boundary: int


def _kept(model: ModelShape, layers: LayerRange, tp: int, size: int) -> _Kept:
    """The tables above, with `size` bytes for what is not always fp32."""
    heads, kv_heads, ffn = (_share(size, tp) for size in (model.heads, model.kv_heads, model.ffn))
    width = model.hidden // max(model.heads, 1)
    hidden, count = model.hidden, layers.last - layers.first + 1
    until_b = count * (size * 2 * (heads * width + kv_heads * width + ffn) + FP32_BYTES * heads)
    until_w = count * (size * (4 * hidden + heads * width + ffn) + FP32_BYTES * 2)
    from_b = count * size * (heads * width + 2 * kv_heads * width + 2 * ffn + 4 * hidden)
    until_b += FP32_BYTES * width
    if layers.first == 0:
        from_b += size * hidden
    if layers.last == model.layers - 1:
        vocab = _share(model.vocab, tp)
        until_b += FP32_BYTES * (vocab + 1) + (_SHARED_LOSS_BYTES if tp > 1 else 0)
        until_w += size * 2 * hidden + FP32_BYTES
        from_b += size * (hidden + vocab)
    return _Kept(until_b, until_w, from_b, size * hidden)


def num_parameters(model: ModelShape, layers: LayerRange, tp: int) -> int:
    """Parameters on one member: its shards of projections and tables, and whole norms."""
    projections = (layers.last - layers.first + 1) * sharded_parameters(model, tp)
    tables = _num_tables(model, layers) * _share(model.vocab, tp) * model.hidden
    return projections + tables + whole_parameters(model, layers)


def whole_parameters(model: ModelShape, layers: LayerRange) -> int:
    """Parameters that every member holds whole: the norms."""
    has_final_norm = layers.last == model.layers - 1
    return (2 * (layers.last - layers.first + 1) + has_final_norm) * model.hidden


def _num_tables(model: ModelShape, layers: LayerRange) -> int:
    return (layers.first == 0) + (layers.last == model.layers - 1)


def sharded_parameters(model: ModelShape, tp: int) -> int:
    """Parameters of one layer that TP divides, on one member: all its projections."""
    heads, kv_heads, ffn = (_share(size, tp) for size in (model.heads, model.kv_heads, model.ffn))
    width = model.hidden // max(model.heads, 1)
    return 2 * model.hidden * (heads + kv_heads) * width + 3 * model.hidden * ffn


def move_bytes(model: ModelShape, move: ShardMove | ShardLoad) -> int:
    """Bytes of one move of a reconfiguration: fp32 parameters and both AdamW moments.

    In bf16 the parameters are the master copy, of which the one that F reads is made anew.
    """
    layer = LayerRange(move.layer, move.layer)
    if move.replicated:
        return 3 * whole_parameters(model, layer) * FP32_BYTES

    def run(units: int) -> int:
        """Units of the chunk, by the executor's rule: near-equal runs, copies where they lack."""
        start = move.chunk * units // move.num_chunks
        return max(start + 1, (move.chunk + 1) * units // move.num_chunks) - start

    width = model.hidden // max(model.heads, 1)
    columns = 2 * (run(model.heads) + run(model.kv_heads)) * width + 3 * run(model.ffn)
    rows = _num_tables(model, layer) * run(model.vocab)
    return 3 * (columns + rows) * model.hidden * FP32_BYTES


def peak_partials(done: Iterable[MicroBatch], num_microbatches: int) -> int:
    """Most gradient sums alive at once when W finishes micro-batches in the order `done`.

    Gradients are added along a fixed binary tree over the numbers of each home, so that a sum
    waits for its sibling: log2(num_microbatches) + 1 in order of number, more across gaps.
    """
    root_level = max(num_microbatches - 1, 0).bit_length()
    alive: set[tuple[int, int, int]] = set()
    peak = 0
    for home, number in done:
        peak = max(peak, len(alive) + 1)
        level = 0
        while level < root_level:
            sibling = (home, level, number ^ 1)
            if (number ^ 1) << level < num_microbatches:
                if sibling not in alive:
                    break
                alive.remove(sibling)
            level, number = level + 1, number >> 1
        alive.add((home, level, number))
    return peak


def _partials_of(plan: Plan, placement: Placement, stream: Stream) -> dict[int, int]:
    """Of each stage of the stream, the first of its group as 0."""
    home = stream.replicas[0] if stream.replicas else 0
    done: dict[int | None, list[MicroBatch]] = {}
    for instr in stream.body:
        if instr.op in (Op.W, Op.BW) and instr.microbatch is not None:
            stage = placement.stage_of(stream.pp, instr)
            micro_batch = MicroBatch(home if instr.home is None else instr.home, instr.microbatch)
            done.setdefault(stage, []).append(micro_batch)
    return {
        at: peak_partials(done.get(stage, ()), plan.batch.microbatches)
        for at, stage in enumerate(placement.stages.get(stream.pp, ()))
    }


def _share(size: int, tp: int) -> int:
    """Rounded up: an unverified plan may not divide."""
    return -(-size // max(tp, 1))
