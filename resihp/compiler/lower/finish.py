"""The pass `finish`: weight gradients are reduced, then everybody steps.

A stage is reduced as soon as the last of its weight gradients is computed, wherever that is. In
a group of several stages the work of the others goes on after that, so that moment is found by
playing the schedule: each stream takes part after what it has started by then. That is one cut
through all streams, so nobody waits there for something that comes after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from resihp.compiler.lower.play import play
from resihp.compiler.lower.steps import Step, bodies_of, lanes_of, replace_bodies
from resihp.ir.model import GroupName, Instr, Op, Plan
from resihp.ir.placement import placement_of

__all__ = ["add_finish"]


def add_finish(plan: Plan, cost: Mapping[Op, float]) -> Plan:
    """`plan` with `reduce_grads` for each stage in its streams, and `step` as their end.

    Raises UserError for a schedule that waits for itself, unless each group has one stage.
    """
    stages = placement_of(plan).stages
    if all(len(held) == 1 for held in stages.values()):
        end = Instr(Op.REDUCE_GRADS), Instr(Op.STEP)
        bodies = {name: (*body, *end) for name, body in bodies_of(plan).items()}
        return replace_bodies(plan, bodies)
    lanes = lanes_of(plan)
    starts: dict[GroupName, list[float]] = {name: [] for name in lanes}
    complete: dict[int | None, float] = defaultdict(float)
    for ran in play(lanes, cost):
        starts[ran.name].append(ran.start)
        for instr, stage in zip(ran.step.instrs, ran.step.stages, strict=True):
            if instr.op in (Op.W, Op.BW):
                complete[stage] = ran.end
    finished = {
        name: list(_finished(steps, starts[name], stages[name.pp], complete))
        for name, steps in lanes.items()
    }
    return replace_bodies(plan, finished)


def _finished(
    steps: Sequence[Step],
    starts: Sequence[float],
    stages: Sequence[int],
    complete: Mapping[int | None, float],
) -> Iterator[Instr]:
    """The steps, each reduction before the first one that starts when its stage is complete."""
    left = sorted(stages, key=lambda stage: (complete[stage], stage), reverse=True)
    for step, start in zip(steps, starts, strict=True):
        while left and complete[left[-1]] <= start:
            yield _reduction(left.pop(), stages)
        yield from step.instrs
    while left:
        yield _reduction(left.pop(), stages)
    yield Instr(Op.STEP)


def _reduction(stage: int, stages: Sequence[int]) -> Instr:
    return Instr(Op.REDUCE_GRADS, stage=stage if len(stages) > 1 else None)
