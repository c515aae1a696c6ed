"""What each instruction of each group takes, on its own: what an emulated device waits for.

The prices are those of the simulator, looked up instruction by instruction and for all replicas,
so that the time of an iteration that is emulated with them is no echo of the simulator's. They
exist for unsound plans too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resihp.compiler.costs import Lengths
from resihp.compiler.pricing import Pricing
from resihp.ir.lanes import BY_TRANSFER, Lane, lanes_of
from resihp.ir.model import Group, GroupName, Op, Plan

__all__ = ["lane_seconds"]


def lane_seconds(
    plan: Plan, pricing: Pricing, lengths: Sequence[Lengths] | None = None
) -> dict[GroupName, list[float]]:
    """Seconds of every instruction of every group of a plan, in the order of its stream.

    A send has what its tensor takes until it may be used, the gather of its chunks included;
    receives, scatters and gathers have nothing. `lengths` as in `simulate`.
    """
    lanes = lanes_of(plan)
    known = [Lengths.of((plan.batch.tokens,))] if lengths is None else lengths
    prices = _Prices(plan, pricing, lanes, known)
    return {name: prices.of(lane) for name, lane in lanes.items()}


class _Prices:
    def __init__(
        self,
        plan: Plan,
        pricing: Pricing,
        lanes: Mapping[GroupName, Lane],
        lengths: Sequence[Lengths],
    ) -> None:
        self._plan = plan
        self._pricing = pricing
        self._lanes = lanes
        self._lengths = lengths
        self._busy = pricing.busy(plan.groups)
        self._reduce_s: dict[int, float] = {}

    def of(self, lane: Lane) -> list[float]:
        """Of every instruction of `lane`."""
        return [self._seconds(lane, index) for index in range(len(lane.body))]

    def _seconds(self, lane: Lane, index: int) -> float:
        op, task = lane.body[index].op, lane.tasks[index]
        if op is Op.STEP:
            return self._pricing.step_s(lane.group)
        if op is Op.REDUCE_GRADS:
            meeting = lane.meeting(index)
            return 0.0 if meeting is None else self._reduction(meeting.stage)
        if op.is_compute and task is not None:
            number = task.home * self._plan.batch.microbatches + task.number
            mine = self._lengths[number % len(self._lengths)]
            layers = lane.placement.layers[task.stage]
            again = task.stage in self._plan.recompute
            return self._pricing.compute_s(lane.group, layers, op, mine, recomputes=again)
        if op.is_send:
            return self._crossing(lane, index)
        return 0.0

    def _crossing(self, lane: Lane, index: int) -> float:
        end, edge = lane.far_end(index), BY_TRANSFER[lane.body[index].op]
        receiver = None if end is None else self._lanes.get(end[0])
        task = lane.tasks[index]
        if receiver is None or task is None:
            return 0.0
        pair = lane.group, receiver.group
        cut = (edge.scatter, task) in lane.first
        return self._pricing.crossing(*pair, self._plan.batch.tokens, cut=cut).seconds

    def _reduction(self, stage: int) -> float:
        if stage not in self._reduce_s:
            placement = next(iter(self._lanes.values())).placement
            pp, layers = placement.pp[stage], placement.layers[stage]
            holders: list[Group] = [group for group in self._plan.groups if group.pp == pp]
            self._reduce_s[stage] = self._pricing.reduce_s(holders, layers, self._busy)
        return self._reduce_s[stage]
