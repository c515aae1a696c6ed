"""A plan for what is left: TP groups shrink or are refilled, replicas that cannot be are dropped.

The steps of an adaptation, each a part of its own: which state is left (`sources`), who forms the
groups (`membership`), who runs which micro-batch in which order (`lower`), whether it fits
(`capacity`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from resihp.compiler.capacity import oversized
from resihp.compiler.lower import lower
from resihp.compiler.membership import Regrouped, Shortage, regroup
from resihp.compiler.schedules import AUTOMATIC, SCHEDULES, runs_on
from resihp.compiler.sources import State, require_state
from resihp.compiler.work import ordered, spread_work
from resihp.errors import NoFeasiblePlan, UserError
from resihp.ir.model import Plan, Resume
from resihp.ir.placement import placement_of

__all__ = ["adapt"]

DEFAULT_SCHEDULES = ("1f1b", "interleaved-1f1b", "looped-bfs")
"""Of plans whose own schedule is none that the compiler can make: the first that fits."""


def adapt(previous: Plan, lost: Iterable[int], step: int) -> Plan:
    """The plan that redoes iteration `step` without the ranks `lost`.

    A group that lost members is refilled from standby ranks, else shrinks to the largest power of
    two of its survivors. A replica with a group that can neither is dropped: its other ranks
    become standby and the micro-batches of its home are spread over the replicas that are left.
    Layers stay where they are. `previous` is a verified plan; ranks that it lost stay lost.

    Raises UserError for ranks that the job does not have, and NoFeasiblePlan when some state is
    gone with its last holder, or when the last replica has too few ranks or too little memory.
    """
    gone = frozenset(previous.lost) | _checked(lost, previous.mesh.world)
    alive = frozenset(range(previous.mesh.world)) - gone
    state = State(previous, gone)
    require_state(state)
    kept = _whole_replicas(previous)
    min_degrees = {group.name: 1 for group in previous.groups}
    while True:
        groups = [group for group in previous.groups if group.replica in kept]
        outcome = regroup(groups, alive, state, previous.mesh, min_degrees)
        if not isinstance(outcome, Regrouped):
            if len(kept) == 1:
                raise NoFeasiblePlan(outcome[0].reason)
            kept.remove(_to_drop(outcome))
            continue
        plan = _planned(previous, outcome, kept, gone, step)
        too_big = oversized(plan)
        if not too_big:
            return plan
        for excess in too_big:
            if excess.group.tp == previous.mesh.tp:
                raise NoFeasiblePlan(str(excess))
            min_degrees[excess.group.name] = 2 * excess.group.tp


def _planned(
    previous: Plan, regrouped: Regrouped, kept: Sequence[int], gone: frozenset[int], step: int
) -> Plan:
    mesh, batch = previous.mesh, previous.batch
    plan = msgspec.structs.replace(
        previous,
        groups=regrouped.groups,
        resume=Resume(step=step),
        standby=regrouped.standby,
        lost=tuple(sorted(gone)),
        returned=(),
        reconfigure=regrouped.reshards,
    )
    work = spread_work(kept, mesh.dp, batch.microbatches)
    return lower(ordered(plan, _schedule_of(previous), work))


def _whole_replicas(previous: Plan) -> list[int]:
    """Replicas that have a group at each position; those without one are dropped."""
    positions = {group.pp for group in previous.groups}
    held: dict[int, set[int]] = {}
    for group in previous.groups:
        held.setdefault(group.replica, set()).add(group.pp)
    whole = sorted(replica for replica, present in held.items() if present == positions)
    if not whole:
        raise NoFeasiblePlan("no replica of the plan before holds all layers")
    return whole


def _schedule_of(previous: Plan) -> str:
    """That of the plan before if it can be made for the stages as they stand, else a default."""
    stages = placement_of(previous).stages
    held = [stages[pp] for pp in sorted(stages)]
    kind = previous.schedule
    is_known = kind in SCHEDULES and (kind not in AUTOMATIC or previous.memory_bytes is not None)
    choices = [kind] if kind is not None and is_known else []
    return next(kind for kind in [*choices, *DEFAULT_SCHEDULES] if runs_on(kind, held))


def _checked(lost: Iterable[int], world: int) -> frozenset[int]:
    ranks = frozenset(lost)
    unknown = sorted(rank for rank in ranks if not 0 <= rank < world)
    if unknown:
        raise UserError(f"lost rank {unknown[0]}: the job's ranks are 0..{world - 1}")
    return ranks


def _to_drop(shortages: Sequence[Shortage]) -> int:
    """The replica to give up: the neediest, the last of these."""
    replicas = {shortage.group.replica for shortage in shortages}

    def need(replica: int) -> tuple[int, int]:
        return sum(shortage.group.replica == replica for shortage in shortages), replica

    return max(replicas, key=need)
