"""A plan at real prices, played the slow and obvious way: the oracle of the simulator."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.compiler.costs import Lengths
from resihp.compiler.pricing import Pricing
from resihp.ir.lanes import EDGES, Lane, lanes_of
from resihp.ir.model import GroupName, Level, Op, Plan
from resihp.ir.transfers import Transfer, handovers_of, transfers_of

Ends = dict[GroupName, list[tuple[float, float]]]
"""(start, end) of every instruction."""


def slow_play(plan: Plan, pricing: Pricing, lengths: Sequence[Lengths] | None = None) -> Ends:
    """Every lane as far as it goes, again and again, until all have ended."""
    lanes = lanes_of(plan)
    is_plan = plan.level is Level.PLAN
    transfers = list(transfers_of(lanes) if is_plan else handovers_of(lanes))
    done: Ends = {name: [] for name in lanes}
    while any(len(done[name]) < len(lane.body) for name, lane in lanes.items()):
        before = sum(map(len, done.values()))
        for name, lane in lanes.items():
            while len(done[name]) < len(lane.body):
                if not _advance(plan, pricing, lengths, lanes, transfers, done, name):
                    break
        assert sum(map(len, done.values())) > before, "streams wait for each other"
    return done


def _advance(
    plan: Plan,
    pricing: Pricing,
    lengths: Sequence[Lengths] | None,
    lanes: dict[GroupName, Lane],
    transfers: list[Transfer],
    done: Ends,
    name: GroupName,
) -> bool:
    """Run the next instruction, or overlapped pair, of a lane if it can."""
    lane, index = lanes[name], len(done[name])
    count = 2 if index in lane.pairs else 1
    start = done[name][-1][1] if done[name] else 0.0
    for transfer in transfers:
        if transfer.receiver == name and transfer.use in range(index, index + count):
            arrival = _arrival(plan, pricing, lanes, done, transfer)
            if arrival is None:
                return False
            start = max(start, arrival)
    meeting = lane.meeting(index)
    if meeting is not None:
        members = [(other, lanes[other].meets.get(meeting)) for other in lanes]
        coming = [(other, at) for other, at in members if at is not None]
        if any(len(done[other]) < at for other, at in coming):
            return False
        start = max([start, *(done[other][at - 1][1] if at else 0.0 for other, at in coming)])
    for at in range(index, index + count):
        end = start + _seconds(plan, pricing, lengths, lane, at)
        done[name].append((start, end))
        start = end
    return True


def _arrival(
    plan: Plan, pricing: Pricing, lanes: dict[GroupName, Lane], done: Ends, transfer: Transfer
) -> float | None:
    sender, receiver = lanes[transfer.sender], lanes[transfer.receiver]
    groups = sender.group, receiver.group
    if plan.level is Level.SCHEDULE:
        last = sender.last_of(transfer.send)
        if len(done[transfer.sender]) <= last:
            return None
        left = done[transfer.sender][last][1]
        return left + pricing.crossing(*groups, plan.batch.tokens).seconds
    if len(done[transfer.sender]) <= transfer.send:
        return None
    edge = next(edge for edge in EDGES if edge.send is sender.body[transfer.send].op)
    cut = (edge.scatter, sender.tasks[transfer.send]) in sender.first
    left = done[transfer.sender][transfer.send][0]
    return left + pricing.crossing(*groups, plan.batch.tokens, cut=cut).seconds


def _seconds(
    plan: Plan, pricing: Pricing, lengths: Sequence[Lengths] | None, lane: Lane, at: int
) -> float:
    op, task = lane.body[at].op, lane.tasks[at]
    if op is Op.STEP:
        return pricing.step_s(lane.group)
    if op is Op.REDUCE_GRADS:
        meeting = lane.meeting(at)
        assert meeting is not None
        pp = lane.placement.pp[meeting.stage]
        holders = [group for group in plan.groups if group.pp == pp]
        return pricing.reduce_s(
            holders, lane.placement.layers[meeting.stage], pricing.busy(plan.groups)
        )
    if not op.is_compute:
        return 0.0
    assert task is not None
    mine = Lengths.of((plan.batch.tokens,))
    if lengths is not None:
        mine = lengths[(task.home * plan.batch.microbatches + task.number) % len(lengths)]
    layers, again = lane.placement.layers[task.stage], task.stage in plan.recompute
    return pricing.compute_s(lane.group, layers, op, mine, recomputes=again)
