"""Orders for slow links: more forwards before the first backward where tensors travel longer.

The rule is that of PipeMorph (arXiv 2504.19232, called Adaptra in the paper), section 6.3 of the
notes that this project started from: with c_i the delay between stages i and i + 1 and F_i the
time of a forward, stage i runs x_i = x_(i+1) + ceil(c_i / F_i) + 2 forwards ahead, the last one 1.
Orders are made for several assumed delays, played with the true ones, and the best is kept: which
of them it is depends on what else is slow.

A delay is a property of the edge here: sends are posted, so a tensor on its way holds up nobody
but who needs it. (Where both ends of a transfer stand still meanwhile, each delay counts about
twice per micro-batch, whatever the order.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from resihp.compiler.planner.balance import homeless_placed
from resihp.compiler.planner.effort import num_chunks
from resihp.compiler.planner.engine import Engine
from resihp.compiler.planner.planned import Placing, Planned
from resihp.compiler.planner.problem import Problem
from resihp.compiler.planner.replay import replay

__all__ = [
    "SHARES",
    "Assumed",
    "assumptions",
    "best_order_for_delays",
    "delay_bounds",
    "shares_within",
    "warmup",
]

SHARES = (1.0, 0.5, 2.0, 0.0, 0.25, 0.75)
"""Of the true delays, which orders are made for; the first ones where not all are worth it. The
published rule is stated with c / F and, in a figure, with 2 c / F: 2 stands for that."""

_NEVER = 1 << 62


class Assumed(NamedTuple):
    """A problem with other delays than the true one, and the bound of the rule for these."""

    share: float
    problem: Problem


def warmup(forwards: Sequence[int], delays: Sequence[int], limit: int) -> tuple[int, ...]:
    """How many forwards each stage runs before its first backward.

    `forwards` are ticks per stage, `delays` ticks per boundary. Stage 0 gets at most `limit`:
    where that is short, each boundary keeps the step of 1F1B, 1, as long as there is one, and
    what is left goes to the boundaries that need the largest steps.
    """
    steps = [-(-delay // max(ticks, 1)) + 2 for ticks, delay in zip(forwards, delays, strict=False)]
    neediest = sorted(range(len(steps)), key=lambda boundary: (-steps[boundary], boundary))
    given = [0] * len(steps)
    left = max(limit - 1, 0)
    for least in (1, None):
        for boundary in neediest:
            wanted = (least or steps[boundary]) - given[boundary]
            granted = min(wanted, left)
            given[boundary] += granted
            left -= granted
    return tuple(1 + sum(given[stage:]) for stage in range(len(steps) + 1))


def delay_bounds(problem: Problem) -> list[tuple[int, ...]]:
    """The different bounds on micro-batches in flight that the rule gives for assumed delays."""
    bounds = (assumed.problem.in_flight for assumed in assumptions(problem, sorted(SHARES)))
    return [bound for bound in dict.fromkeys(bounds) if bound is not None]


def shares_within(budget: int, problem: Problem, placing: Placing) -> tuple[float, ...]:
    """Of the `SHARES`, at least one, as many as about `budget` chunks of work suffice for."""
    return SHARES[: max(1, budget // max(num_chunks(problem, placing), 1))]


def assumptions(problem: Problem, shares: Sequence[float] = SHARES) -> Iterator[Assumed]:
    """`problem` at each of the `shares` of its delays, with the bound that the rule gives there.

    Replicas share a bound, so the longest delay and the shortest forward of a stage count.
    """
    forwards = [
        min((row.chunks[s].forward for row in problem.replicas if row.chunks[s]), default=1)  # pyright: ignore
        for s in range(problem.num_stages)
    ]
    limit = min(problem.num_microbatches, _room(problem))
    for share in shares:
        rows = tuple(
            row._replace(edges=tuple(round(ticks * share) for ticks in row.edges))
            for row in problem.replicas
        )
        delays = [max(ticks) for ticks in zip(*(row.edges for row in rows), strict=True)]
        bound = warmup(forwards, delays, limit)
        crossing = tuple(round(ticks * share) for ticks in problem.crossing)
        yield Assumed(share, problem._replace(replicas=rows, crossing=crossing, in_flight=bound))


def best_order_for_delays(
    problem: Problem,
    placing: Placing | None = None,
    *,
    shares: Sequence[float] = SHARES,
    known: Planned | None = None,
) -> Planned:
    """The shortest plan at the true delays among those that are made for assumed ones.

    Everything stays at home that has one, unless `placing` says otherwise. The bound of
    `problem` on micro-batches in flight is replaced by the rule's; memory bounds all plans.
    `known` is returned where nothing is shorter.
    """
    where = homeless_placed(problem) if placing is None else placing
    best = known
    for assumed in assumptions(problem, shares):
        planned = Engine(assumed.problem, where).run_within(_limit(best, assumed))
        if planned is None:
            continue
        makespan = replay(problem, planned)
        assert makespan is not None, "what ran with some delays runs with all of them"
        planned = planned._replace(makespan=makespan, ends=())
        if best is None or _rank(planned) < _rank(best):
            best = planned
    assert best is not None
    return best


def _limit(best: Planned | None, assumed: Assumed) -> int:
    """With longer delays nothing ends sooner, so what takes longer with short ones cannot win."""
    return best.makespan if best is not None and best.complete and assumed.share <= 1 else _NEVER


def _rank(planned: Planned) -> tuple[bool, int]:
    return not planned.complete, planned.makespan


def _room(problem: Problem) -> int:
    """Forwards that fit into the memory of every first stage before any backward."""
    sizes = [row.memory[0] for row in problem.replicas]
    return min(
        (
            max(1, (size.free - size.held) // max(size.activation, 1))
            for size in sizes
            if size is not None
        ),
        default=1,
    )
