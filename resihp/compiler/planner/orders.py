"""From what was planned to streams of a schedule."""

from __future__ import annotations

from resihp.compiler.planner.planned import Planned
from resihp.ir.model import Instr, Op, Stream

__all__ = ["streams_of"]


def streams_of(planned: Planned) -> tuple[Stream, ...]:
    """F, B, W and BW of every worker; replicas of one class share a stream.

    For plans with one stage per position of the pipeline.
    """
    instrs = _Instrs()
    members: dict[int, list[int]] = {}
    for replica, order in planned.orders.items():
        members.setdefault(id(order), []).append(replica)
    return tuple(
        Stream(
            replicas=tuple(sorted(replicas)),
            pp=stage,
            body=tuple(map(instrs.__getitem__, planned.orders[replicas[0]][stage])),
        )
        for replicas in members.values()
        for stage in range(len(planned.orders[replicas[0]]))
        if planned.orders[replicas[0]][stage]
    )


class _Instrs(dict[tuple[Op, int, int], Instr]):
    """Instructions by (operation, home, number), each made once."""

    def __missing__(self, work: tuple[Op, int, int]) -> Instr:
        op, home, number = work
        instr = self[work] = Instr(op, number, None if home < 0 else home)
        return instr
