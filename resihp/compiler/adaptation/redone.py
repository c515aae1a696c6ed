"""The iteration that is redone, without what is kept of it: what is left is shared out anew.

A replica whose micro-batches are all kept would else wait while another one does all of its own
again. Who adds a gradient does not matter to the sum (`executor/gradients.py`), so anybody may run
what is left, on the layout of the plan that follows.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import product

from resihp.compiler.adaptation.emit import with_streams
from resihp.compiler.adaptation.layouts import Layout
from resihp.compiler.adaptation.problems import problem_of
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.facts import facts_of
from resihp.compiler.planner.balance import balanced, homeless_placed
from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.orders import streams_of
from resihp.compiler.planner.planned import GREEDY, Order, Planned, Style
from resihp.compiler.planner.problem import Problem
from resihp.compiler.planner.replay import replay
from resihp.compiler.pricing import Pricing
from resihp.ir.kept import without
from resihp.ir.model import MicroBatch, Op, Plan, Stream
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.verify import has_errors, verify

__all__ = ["redone"]

_STYLES = (GREEDY, Style(overrun=0.0))
_COMPUTE = (Op.F, Op.B, Op.W, Op.BW)


def redone(plan: Plan, pricing: Pricing, keep: Collection[MicroBatch], step: int) -> Plan:
    """`plan` as it redoes iteration `step` without the micro-batches `keep`.

    Either in its own order without them, or with those that are left shared out and ordered anew,
    where that takes less time and fits into memory. Its groups and all else stay as they are.
    """
    filtered = without(plan, keep, step)
    situation = Situation(plan, pricing)
    if len(keep) == plan.mesh.dp * plan.batch.microbatches or not situation.has_one_stage_each:
        return filtered
    layout = Layout(plan.groups, plan.standby, plan.lost)
    problem = problem_of(situation, layout)._replace(kept=frozenset(keep))
    least = _makespan_of(filtered, problem)
    planned = _played(problem)
    if not planned.complete or planned.makespan >= least:
        return filtered
    other = with_streams(filtered, streams_of(planned), pricing)
    return other if _has_room(other) else filtered


def _makespan_of(plan: Plan, problem: Problem) -> int:
    """Ticks until the last worker ends when all keep to the orders of `plan`."""
    orders: dict[int, list[Order]] = {
        replica: [()] * problem.num_stages for replica in range(len(problem.replicas))
    }
    for stream in plan.streams:
        for replica in stream.replicas:
            orders[replica][stream.pp] = _order_of(stream)
    each = {replica: tuple(of) for replica, of in orders.items()}
    # Where no placing is told, replicas with another object each are played one by one.
    ticks = replay(problem, Planned(0, each, {}, complete=True))
    assert ticks is not None, "what is left of a plan goes on"
    return ticks


def _order_of(stream: Stream) -> Order:
    return tuple(
        (instr.op, -1 if instr.home is None else instr.home, instr.microbatch)
        for instr in stream.body
        if instr.op in _COMPUTE and instr.microbatch is not None
    )


def _played(problem: Problem) -> Planned:
    """The shortest of some plays: with what is left shared out evenly, or at home."""
    placings = [balanced(problem), homeless_placed(problem)]
    bounds = dict.fromkeys((None, problem.in_flight))
    plays = (
        Engine(problem._replace(in_flight=bound), placing, style=style).run()
        for placing, bound, style in product(placings, bounds, _STYLES)
    )
    return min(plays, key=lambda each: (not each.complete, each.makespan, each.num_moved))


def _has_room(plan: Plan) -> bool:
    """Whether it fits, with all that the planner does not count; else the verifier is content."""
    if plan.memory_bytes is None:
        return True
    return not has_errors(verify(parse(print_plan(plan)), facts=facts_of))
