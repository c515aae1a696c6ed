"""Orders of forward, activation-gradient and weight-gradient work, one list per position.

An order knows micro-batches only by number and the pipeline only by its stages and positions:
which rank computes, what is sent and what has failed is decided elsewhere (`resihp.compiler.work`,
`resihp.compiler.lower`, `resihp.compiler.adapt`).
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from resihp.errors import UserError
from resihp.ir.model import Op

__all__ = [
    "AUTOMATIC",
    "ONE_STAGE",
    "SCHEDULES",
    "Placed",
    "Work",
    "order_at",
    "placed",
    "runs_on",
    "schedule_order",
]

_NUM_CHUNKS = {
    "1f1b": 1,
    "gpipe": 1,
    "interleaved-1f1b": 2,
    "looped-bfs": 2,
    "zb-auto": 1,
    "zb-h1": 1,
    "zb-h2": 1,
    "zbv": 2,
}
"""Stages per position that each schedule has where nothing is said."""
SCHEDULES = tuple(_NUM_CHUNKS)
"""Names of all schedules."""
AUTOMATIC = ("zb-auto",)
"""Those whose order depends on costs and memory; `resihp.compiler.ordered` makes it."""
ONE_STAGE = tuple(
    kind for kind, count in _NUM_CHUNKS.items() if count == 1 and kind not in AUTOMATIC
)
"""Those with one stage per position whose order is always the same."""

Placed = Sequence[Sequence[int]]
"""The stages of each position, ascending."""


class Work(NamedTuple):
    """One chunk of compute: F, B, W or BW of one micro-batch at one stage."""

    op: Op
    stage: int
    microbatch: int


def schedule_order(
    kind: str, num_positions: int, num_microbatches: int, num_chunks: int | None = None
) -> list[list[Work]]:
    """What each position of the pipeline computes, in order, under the schedule `kind`.

    With one stage per position: `gpipe` runs all forwards, then all backwards. `1f1b` (Narayanan et
    al. 2019) keeps at most `num_positions - stage` micro-batches in flight. `zb-h1` (Qi et al.
    2024) splits the backward and fills the bubble with weight gradients, with at most
    `num_positions` in flight everywhere: the peak of 1F1B's first stage. `zb-h2` (Qi et al. 2024)
    starts as many forwards as there is time for before the first backward can come, with up to
    `2 * num_positions - 1` in flight, and no stage idles between its first forward and its last
    weight gradient where F, B and W take equally long.

    With `num_chunks` stages per position (by default 2), looped: `looped-bfs` (Lamy-Poirier 2023)
    runs stage by stage, all forwards up and all backwards down. `interleaved-1f1b` (Narayanan et
    al. 2021) alternates forwards and backwards, a round of micro-batches at one stage before the
    next. In V shape, two stages per position: `zbv` (Qi et al. 2024) ends without bubbles where F,
    B and W take equally long, in the memory of 1F1B.

    Raises UserError for an unknown `kind`, one that has not so many stages per position, or an
    automatic one, whose order follows from costs and memory.
    """
    return order_at(kind, placed(kind, num_positions, num_chunks), num_microbatches)


def placed(kind: str, num_positions: int, num_chunks: int | None = None) -> list[tuple[int, ...]]:
    """The stages of each position under `kind`: looped, or in V shape for `zbv`.

    Raises UserError for an unknown `kind`, or one that has not so many stages per position.
    """
    assert num_positions >= 1
    if kind not in SCHEDULES:
        close = difflib.get_close_matches(kind, SCHEDULES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"schedule {kind!r} is none of {', '.join(SCHEDULES)}{hint}")
    chunks = _NUM_CHUNKS[kind] if num_chunks is None else num_chunks
    stages = [
        tuple(_stage(kind, chunk, position, num_positions) for chunk in range(chunks))
        for position in range(num_positions)
    ]
    if chunks < 1 or not runs_on(kind, stages):
        raise UserError(
            f"schedule {kind} with {chunks} stages per position: nearest valid: {_NUM_CHUNKS[kind]}"
        )
    return stages


def runs_on(kind: str, stages: Placed) -> bool:
    """Whether schedule `kind` is made for stages that are placed so."""
    if kind in ("gpipe", "looped-bfs"):
        return True
    if kind in ("1f1b", "zb-h1", "zb-h2", *AUTOMATIC):
        return all(tuple(held) == (position,) for position, held in enumerate(stages))
    num_chunks = len(stages[0])
    return (kind == "interleaved-1f1b" or num_chunks == 2) and all(
        tuple(held) == tuple(_stage(kind, c, position, len(stages)) for c in range(num_chunks))
        for position, held in enumerate(stages)
    )


def order_at(kind: str, stages: Placed, num_microbatches: int) -> list[list[Work]]:
    """The order of each position under a `kind` that `runs_on` these `stages`.

    Raises UserError for an automatic schedule.
    """
    assert runs_on(kind, stages), f"{kind} on {stages}"
    if kind in AUTOMATIC:
        raise UserError(
            f"schedule {kind} has no order of its own: it is made for the costs and the memory "
            "of a plan; nearest valid: zb-h1"
        )
    assert num_microbatches >= 1
    num_positions = len(stages)
    match kind:
        case "gpipe":
            return [_stage_by_stage(held, range(num_microbatches)) for held in stages]
        case "looped-bfs":
            return [_stage_by_stage(held, range(num_microbatches)[::-1]) for held in stages]
        case "1f1b":
            return [_one_f_one_b(s, num_positions, num_microbatches) for (s,) in stages]
        case "zb-h1":
            return [_zb_h1(s, num_positions, num_microbatches) for (s,) in stages]
        case "zb-h2":
            return [_zb_h2(s, num_positions, num_microbatches) for (s,) in stages]
        case "interleaved-1f1b":
            return [_interleaved(held, num_positions, num_microbatches) for held in stages]
        case _:
            return [_zbv(down, up, num_positions, num_microbatches) for down, up in stages]


def _stage(kind: str, chunk: int, position: int, num_positions: int) -> int:
    """Which stage is the `chunk`-th of a position."""
    turns_back = kind == "zbv" and chunk % 2 == 1
    return chunk * num_positions + (num_positions - 1 - position if turns_back else position)


def _stage_by_stage(stages: Sequence[int], backwards: Sequence[int]) -> list[Work]:
    """All forwards, the first stage first, then all backwards, the last stage first."""
    order = [Work(Op.F, stage, m) for stage in stages for m in sorted(backwards)]
    return order + [Work(Op.BW, stage, m) for stage in reversed(stages) for m in backwards]


def _one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> list[Work]:
    forwards = [Work(Op.F, stage, m) for m in range(num_microbatches)]
    backwards = [Work(Op.BW, stage, m) for m in range(num_microbatches)]
    return _alternate(forwards, backwards, num_warmup=num_stages - 1 - stage)


def _interleaved(stages: Sequence[int], num_positions: int, num_microbatches: int) -> list[Work]:
    """Micro-batches go through all stages of the position in rounds, in 1F1B order.

    There are as many rounds as fit with one micro-batch per position; what is left over makes the
    first ones longer.
    """
    num_rounds = max(1, num_microbatches // num_positions)
    starts = [-(-num_microbatches * turn // num_rounds) for turn in range(num_rounds + 1)]
    rounds = [range(first, end) for first, end in pairwise(starts)]
    forwards = [Work(Op.F, s, m) for members in rounds for s in stages for m in members]
    backwards = [Work(Op.BW, s, m) for members in rounds for s in stages[::-1] for m in members]
    to_the_last = 2 * (num_positions - 1 - stages[0])
    return _alternate(forwards, backwards, (len(stages) - 1) * len(rounds[0]) + to_the_last)


def _alternate(forwards: list[Work], backwards: list[Work], num_warmup: int) -> list[Work]:
    """`num_warmup` forwards, then a forward and a backward in turn, then the other backwards."""
    order = forwards[:num_warmup]
    steady = forwards[num_warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(steady) :]


def _zb_h1(stage: int, num_stages: int, num_microbatches: int) -> list[Work]:
    """1F1B with the weight gradients of stage `s` held back by `s` micro-batches.

    Each stage so has at most `num_stages` in flight, and the activation gradients that the stages
    before it wait for go out two units earlier per stage than under 1F1B. At unit costs all end
    after 3 M + P - 1 units (P - M more where M < P), which no order with that cap can beat.
    """
    num_warmup = min(num_stages - 1 - stage, num_microbatches)
    order = [Work(Op.F, stage, m) for m in range(num_warmup)]
    for backward in range(num_microbatches):
        if backward + num_warmup < num_microbatches:
            order.append(Work(Op.F, stage, backward + num_warmup))
        order.append(Work(Op.B, stage, backward))
        if backward >= stage:
            order.append(Work(Op.W, stage, backward - stage))
    num_weighted = max(0, num_microbatches - stage)
    return order + [Work(Op.W, stage, m) for m in range(num_weighted, num_microbatches)]


def _zb_h2(stage: int, num_stages: int, num_microbatches: int) -> list[Work]:
    """A warm-up of `2 (P - stage) - 1` forwards, the weight gradients held back by `2 stage`.

    A stage then never waits after its first forward: its first backward comes when the warm-up
    ends, and each stage on the way back ends one unit before the next. Each has at most 2 P - 1 in
    flight, fewer than its warm-up and what it holds back together.
    """
    num_warmup = min(2 * (num_stages - stage) - 1, num_microbatches)
    held_back = 2 * stage
    order = [Work(Op.F, stage, m) for m in range(num_warmup)]
    for backward in range(num_microbatches):
        order.append(Work(Op.B, stage, backward))
        if backward >= held_back:
            order.append(Work(Op.W, stage, backward - held_back))
        if backward + num_warmup < num_microbatches:
            order.append(Work(Op.F, stage, backward + num_warmup))
    num_weighted = max(0, num_microbatches - held_back)
    return order + [Work(Op.W, stage, m) for m in range(num_weighted, num_microbatches)]


def _zbv(down: int, up: int, num_positions: int, num_microbatches: int) -> list[Work]:
    """Stage `down` on the way to the turn of the V, stage `up` on the way back.

    The order is made for as many micro-batches as fill the pipeline; those that do not exist are
    then left out.
    """
    num_full = max(2 * num_positions - 1, num_microbatches)
    to_the_turn = num_positions - down
    done: Counter[tuple[Op, int]] = Counter()
    order: list[Work] = []

    def run(*works: tuple[Op, int], times: int = 1) -> None:
        for work in works * times:
            order.append(Work(*work, done[work]))
            done[work] += 1

    run((Op.F, down), times=2 * to_the_turn - 1)
    run((Op.F, up), (Op.F, down), times=down)
    run((Op.F, up), (Op.B, up), (Op.W, up), times=to_the_turn)
    while done[Op.F, up] < num_full:
        if done[Op.F, down] < num_full:
            run((Op.F, down))
        run((Op.B, down), (Op.W, down), (Op.F, up), (Op.B, up), (Op.W, up))
    run((Op.B, down), (Op.B, up), times=down)
    run((Op.B, down), (Op.W, down), times=to_the_turn)
    run((Op.W, up), times=num_full - done[Op.W, up])
    run((Op.W, down), times=num_full - done[Op.W, down])
    return [work for work in order if work.microbatch < num_microbatches]
