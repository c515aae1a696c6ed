"""What iterations and changes of plan leave behind: tensors, threads, descriptors, memory."""

from __future__ import annotations

from itertools import cycle, islice
from typing import NamedTuple

import msgspec
from fleet import Fleet
from fleet_host import Resources
from parity_bounds import job_of
from parity_cases import UNTIED, by_hand
from parity_crew import TrainTo, leave, train

from resihp.compiler.reconfigure import reconfiguration
from resihp.ir.model import Plan
from resihp.wire.messages import Commit

MODEL = msgspec.structs.replace(UNTIED, num_hidden_layers=4)
RESIDENT_BYTES = 32 << 20
"""Growth of a process that is the allocator's: freed blocks of plans that differ in size."""
_PATIENCE = 300
"""How often a process is asked before what it holds counts as left behind."""


class Leaks(NamedTuple):
    """One process after a few plans, and after many."""

    before: Resources
    after: Resources

    @property
    def are_none(self) -> bool:
        """Whether nothing is left that can be counted, and memory has not grown."""
        growth_bytes = self.after.resident_bytes - self.before.resident_bytes
        return _is_within(self.after, self.before) and growth_bytes <= RESIDENT_BYTES


def leaks(num_plans: int, num_iterations: int, num_warm: int) -> Leaks:
    """Train `num_plans` plans one after the other, each for `num_iterations`, all in one process.

    After `num_warm` of them everything that is kept for ever is there.
    """
    layouts = _layouts()
    assert (num_plans - num_warm) % len(layouts) == 0, "the same layout at both looks"
    job = job_of("untied", layouts[0].mesh)
    section = msgspec.structs.replace(job.job, steps=num_plans * num_iterations)
    job = msgspec.structs.replace(job, model=MODEL, job=section)
    before: Resources | None = None
    previous: Plan | None = None
    base = 0
    commit = Commit(version=0, updates=0, record=None)
    with Fleet() as fleet:
        for number, layout in enumerate(islice(cycle(layouts), num_plans)):
            plan = layout if previous is None else _after(previous, layout)
            order = TrainTo(job, (number + 1) * num_iterations, previous, base, commit)
            ranks = range(plan.mesh.world)
            stands = fleet.run(plan, train, order, ranks=ranks)
            fleet.run(plan, leave, ranks=ranks)
            base = stands[plan.active_ranks[0]].generation
            last = stands[plan.active_ranks[0]].records[-1]
            assert not last.skipped
            commit = Commit(version=last.step + 1, updates=last.step + 1, record=last)
            previous = plan
            if number + 1 == num_warm:
                before = _settled(fleet, None)
        assert before is not None
        return Leaks(before, _settled(fleet, before))


def _layouts() -> list[Plan]:
    """For the same ranks: other degrees, several stages per rank, work that moved."""
    shapes = (
        ([[2, 1], [1, 2]], "1f1b", 0),
        ([[1, 1], [1, 1]], "interleaved-1f1b", 0),
        ([[2, 2], [1, 1]], "zb-h1", 2),
    )
    return [
        by_hand(degrees, kind=kind, num_moved=moved, model=MODEL, largest=2)[0].plan
        for degrees, kind, moved in shapes
    ]


def _after(previous: Plan, layout: Plan) -> Plan:
    """`layout` with what its groups need of the plan before."""
    lines = reconfiguration(previous, layout.groups, ())
    return msgspec.structs.replace(layout, reconfigure=lines)


def _settled(fleet: Fleet, expected: Resources | None) -> Resources:
    """What the process holds once the groups that were let go are gone; that takes a moment."""
    (found,) = fleet.resources()
    for _ in range(_PATIENCE):
        (again,) = fleet.resources()
        is_still = _counts(again) == _counts(found)
        if is_still and (expected is None or _is_within(again, expected)):
            break
        found = again
    return found


def _is_within(found: Resources, expected: Resources) -> bool:
    """Whether every count is at most the expected one."""
    return all(x <= y for x, y in zip(_counts(found), _counts(expected), strict=True))


def _counts(resources: Resources) -> tuple[int, int, int, int]:
    return (
        resources.num_tensors,
        resources.tensor_bytes,
        resources.num_threads,
        resources.num_descriptors,
    )
