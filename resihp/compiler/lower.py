"""From who computes what to streams: every send, receive, scatter, gather, reduction and step.

A transfer stands next to the compute that it belongs to: a receive (and its gather) right before
its consumer, a send (and its scatter) right after its producer. Sends are posted and never wait, so
this order is as early as a stream can say it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from resihp.compiler.schedules import Work, schedule_order
from resihp.ir.lanes import MicroBatch
from resihp.ir.model import Group, GroupName, Instr, Op, Stream

__all__ = ["home_work", "lower", "spread_work"]


class _Degrees(NamedTuple):
    """TP degrees of a group and of its neighbours in the pipeline (None: there is none)."""

    previous: int | None
    here: int
    following: int | None


def home_work(replicas: Iterable[int], num_microbatches: int) -> dict[int, list[MicroBatch]]:
    """What each replica runs when each runs its own."""
    return {
        replica: [MicroBatch(replica, number) for number in range(num_microbatches)]
        for replica in replicas
    }


def spread_work(
    replicas: Sequence[int], num_replicas: int, num_microbatches: int
) -> dict[int, list[MicroBatch]]:
    """What each of the `replicas` that are left runs: its own, then its share of the others'.

    The micro-batches of the replicas that are gone are dealt out in runs whose lengths differ by
    at most one; a run may begin in one home and end in the next.
    """
    work = home_work(replicas, num_microbatches)
    gone = [replica for replica in range(num_replicas) if replica not in work]
    homeless = [MicroBatch(home, number) for home in gone for number in range(num_microbatches)]
    for index, replica in enumerate(replicas):
        first = index * len(homeless) // len(replicas)
        end = (index + 1) * len(homeless) // len(replicas)
        work[replica] += homeless[first:end]
    return work


def lower(
    groups: Sequence[Group],
    work: Mapping[int, Sequence[MicroBatch]],
    schedule: str,
    num_stages: int,
) -> tuple[Stream, ...]:
    """The stream of every group, one for all replicas of a stage whose bodies are the same.

    Each replica runs `schedule` over the list of its micro-batches in `work`, foreign ones like
    its own. Raises UserError for an unknown schedule.
    """
    degrees = {group.name: group.tp for group in groups}
    orders = {
        count: schedule_order(schedule, num_stages, count)
        for count in {len(items) for items in work.values()}
    }
    members: dict[tuple[int, _Degrees, tuple[Instr, ...]], list[int]] = {}
    for group in groups:
        replica, stage = group.name
        around = _Degrees(
            degrees.get(GroupName(replica, stage - 1)),
            group.tp,
            degrees.get(GroupName(replica, stage + 1)),
        )
        named = tuple(
            Instr(Op.F, item.number, None if item.home == replica else item.home)
            for item in work[replica]
        )
        members.setdefault((stage, around, named), []).append(replica)
    return tuple(
        Stream(
            replicas=tuple(replicas),
            pp=stage,
            body=tuple(_body(orders[len(named)][stage], named, around)),
        )
        for (stage, around, named), replicas in members.items()
    )


def _body(order: Sequence[Work], named: Sequence[Instr], degrees: _Degrees) -> Iterator[Instr]:
    """One stage's instructions; `named[i]` carries the name of the i-th micro-batch."""
    for work in order:
        name = named[work.microbatch]
        for op in _around(work.op, degrees):
            yield Instr(op, name.microbatch, name.home)
    yield Instr(Op.REDUCE_GRADS)
    yield Instr(Op.STEP)


def _around(op: Op, degrees: _Degrees) -> list[Op]:
    """The compute `op` with the transfers before and after it."""
    if op is Op.W:
        return [op]
    before, after = degrees.previous, degrees.following
    receive = [Op.RECV_ACT, Op.GATHER_ACT]
    send = [Op.SCATTER_ACT, Op.SEND_ACT]
    if op is not Op.F:
        before, after = after, before
        receive = [Op.RECV_GRAD, Op.GATHER_GRAD]
        send = [Op.SCATTER_GRAD, Op.SEND_GRAD]
    if before is None:
        receive = []
    elif before == degrees.here:
        receive = receive[:1]
    if after is None:
        send = []
    elif after == degrees.here:
        send = send[1:]
    return [*receive, op, *send]
