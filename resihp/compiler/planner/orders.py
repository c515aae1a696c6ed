"""From what was planned to streams of a schedule."""

from __future__ import annotations

from resihp.compiler.planner.planned import Planned
from resihp.ir.model import Instr, Op, Stream

__all__ = ["streams_of"]


def streams_of(planned: Planned) -> tuple[Stream, ...]:
    """F, B, W and BW of every worker; replicas of one class share a stream.

    For plans with one stage per position of the pipeline.
    """
    instrs: dict[tuple[Op, int, int], Instr] = {}

    def instr(work: tuple[Op, int, int]) -> Instr:
        if work not in instrs:
            op, home, number = work
            instrs[work] = Instr(op, number, None if home < 0 else home)
        return instrs[work]

    members: dict[int, list[int]] = {}
    for replica, order in planned.orders.items():
        members.setdefault(id(order), []).append(replica)
    return tuple(
        Stream(
            replicas=tuple(sorted(replicas)),
            pp=stage,
            body=tuple(instr(work) for work in planned.orders[replicas[0]][stage]),
        )
        for replicas in members.values()
        for stage in range(len(planned.orders[replicas[0]]))
        if planned.orders[replicas[0]][stage]
    )
