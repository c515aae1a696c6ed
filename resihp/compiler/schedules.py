"""Orders of forward, activation-gradient and weight-gradient work, one list per stage.

An order knows micro-batches only by number and stages only by position: which rank computes, what
is sent and what has failed is decided elsewhere (`resihp.compiler.lower`, `resihp.compiler.adapt`).
"""

from __future__ import annotations

import difflib
from typing import NamedTuple

from resihp.errors import UserError
from resihp.ir.model import Op

__all__ = ["SCHEDULES", "Work", "schedule_order"]

SCHEDULES = ("1f1b", "gpipe", "zb-h1")
"""Names that `schedule_order` knows."""


class Work(NamedTuple):
    """One chunk of compute: F, B, W or BW of one micro-batch."""

    op: Op
    microbatch: int


def schedule_order(kind: str, num_stages: int, num_microbatches: int) -> list[list[Work]]:
    """What each stage computes, in order, under the schedule `kind`.

    `gpipe` runs all forwards, then all backwards. `1f1b` (Narayanan et al. 2019) keeps at most
    `num_stages - stage` micro-batches in flight. `zb-h1` (Qi et al. 2024) splits the backward and
    fills the bubble with weight gradients, with at most `num_stages` in flight on every stage: the
    peak of 1F1B's first stage.

    Raises UserError for an unknown `kind`.
    """
    assert num_stages >= 1
    assert num_microbatches >= 1
    if kind == "gpipe":
        return [_gpipe(num_microbatches) for _ in range(num_stages)]
    if kind == "1f1b":
        return [
            _one_f_one_b(min(num_stages - 1 - stage, num_microbatches), num_microbatches)
            for stage in range(num_stages)
        ]
    if kind == "zb-h1":
        return [_zb_h1(stage, num_stages, num_microbatches) for stage in range(num_stages)]
    close = difflib.get_close_matches(kind, SCHEDULES, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise UserError(f"schedule {kind!r} is none of {', '.join(SCHEDULES)}{hint}")


def _gpipe(num_microbatches: int) -> list[Work]:
    forwards = [Work(Op.F, m) for m in range(num_microbatches)]
    return forwards + [Work(Op.BW, m) for m in range(num_microbatches)]


def _one_f_one_b(num_warmup: int, num_microbatches: int) -> list[Work]:
    order = [Work(Op.F, m) for m in range(num_warmup)]
    for forward in range(num_warmup, num_microbatches):
        order += [Work(Op.F, forward), Work(Op.BW, forward - num_warmup)]
    return order + [Work(Op.BW, m) for m in range(num_microbatches - num_warmup, num_microbatches)]


def _zb_h1(stage: int, num_stages: int, num_microbatches: int) -> list[Work]:
    """1F1B with the weight gradients of stage `s` held back by `s` micro-batches.

    Each stage so has at most `num_stages` in flight, and the activation gradients that the stages
    before it wait for go out two units earlier per stage than under 1F1B. At unit costs all end
    after 3 M + P - 1 units (P - M more where M < P), which no order with that cap can beat.
    """
    num_warmup = min(num_stages - 1 - stage, num_microbatches)
    order = [Work(Op.F, m) for m in range(num_warmup)]
    for backward in range(num_microbatches):
        if backward + num_warmup < num_microbatches:
            order.append(Work(Op.F, backward + num_warmup))
        order.append(Work(Op.B, backward))
        if backward >= stage:
            order.append(Work(Op.W, backward - stage))
    num_weighted = max(0, num_microbatches - stage)
    return order + [Work(Op.W, m) for m in range(num_weighted, num_microbatches)]
