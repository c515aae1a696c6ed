"""Random plans in which everything but progress is right.

Each stream is a random order of its instructions that keeps what must come before what; how far
it strays from a schedule that works is drawn too, so some plans are free of deadlock, others not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
from plan_build import make_plan

from resihp.ir.model import GroupName, Instr, Op, Plan

_BEFORE = {
    Op.GATHER_ACT: (Op.RECV_ACT,),
    Op.F: (Op.RECV_ACT, Op.GATHER_ACT),
    Op.SCATTER_ACT: (Op.F,),
    Op.SEND_ACT: (Op.F, Op.SCATTER_ACT),
    Op.GATHER_GRAD: (Op.RECV_GRAD,),
    Op.B: (Op.F, Op.RECV_GRAD, Op.GATHER_GRAD),
    Op.BW: (Op.F, Op.RECV_GRAD, Op.GATHER_GRAD),
    Op.W: (Op.B,),
    Op.SCATTER_GRAD: (Op.B, Op.BW),
    Op.SEND_GRAD: (Op.B, Op.BW, Op.SCATTER_GRAD),
}
"""What an instruction needs to come after, of the same micro-batch."""
_TRANSFERS = (Op.SEND_ACT, Op.RECV_ACT, Op.SEND_GRAD, Op.RECV_GRAD)


def random_plan(rng: random.Random) -> Plan:
    """A plan without findings other than RHP501."""
    pp, dp = rng.choice((2, 2, 3, 4)), rng.choice((1, 1, 2))
    names = [GroupName(replica, stage) for replica in range(dp) for stage in range(pp)]
    degrees = {name: rng.choice((1, 2)) for name in names}
    plan = make_plan(
        pp=pp,
        dp=dp,
        tp=2,
        microbatches=rng.choice((1, 2, 3)),
        order=rng.choice(("1f1b", "gpipe")),
        split=rng.random() < 0.5,
        degrees=degrees,
        scatter=rng.random() < 0.3,
        gone={1: 0} if dp == 2 and rng.random() < 0.3 else None,
    )
    disorder = rng.choice((0.0, 0.5, 1.0, 2.0, 4.0, 20.0))
    streams = tuple(
        msgspec.structs.replace(stream, body=_shuffled(stream.body, disorder, rng))
        for stream in plan.streams
    )
    return msgspec.structs.replace(plan, streams=streams)


def _shuffled(body: Sequence[Instr], disorder: float, rng: random.Random) -> tuple[Instr, ...]:
    """Another order, near the old one if `disorder` is small; transfers of a kind stay in order."""
    waiting = {instr: place + rng.uniform(0, disorder) for place, instr in enumerate(body[:-2])}
    rank = {instr: place for place, instr in enumerate(body)}

    def is_free(instr: Instr) -> bool:
        for other in waiting:
            if _same(other, instr) and other.op in _BEFORE.get(instr.op, ()):
                return False
            if other.op is instr.op and instr.op in _TRANSFERS and rank[other] < rank[instr]:
                return False
        return True

    shuffled: list[Instr] = []
    while waiting:
        instr = min(filter(is_free, waiting), key=waiting.__getitem__)
        del waiting[instr]
        shuffled.append(instr)
    return (*shuffled, *body[-2:])


def _same(one: Instr, other: Instr) -> bool:
    return (one.microbatch, one.home) == (other.microbatch, other.home)
