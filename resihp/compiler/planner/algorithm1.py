"""Algorithm 1 of the paper (section 6.3): migration by progress, while the pipelines are played.

The progress of a worker is the number of forwards that it has run. Where the fastest replica of a
stage is more than delta ahead of the slowest, the next pending micro-batch of the slowest goes to
the fastest, if memory allows.

Read literally this cascades: the stages behind a slow one lag as well, though they are not slow,
and nearly everything moves. The guard moves a micro-batch only if the receiver, with it, has less
work assigned than the giver had.
"""

from __future__ import annotations

from resihp.compiler.planner.engine import Engine, Migrate
from resihp.compiler.planner.workers import Worker

__all__ = ["progress_rule"]


def progress_rule(delta: int = 0, *, guarded: bool = True) -> Migrate:
    """The rule, for `Engine(..., migrate=...)`."""

    def migrate(engine: Engine, stage: int) -> None:
        if guarded and stage in engine.reloaded and not _can_gain(_workers(engine, stage)):
            engine.reloaded.remove(stage)
        if guarded and stage not in engine.reloaded:
            return
        while _migrate_one(engine, stage, delta, guarded=guarded):
            pass

    return migrate


def _can_gain(workers: list[Worker]) -> bool:
    """Whether the least loaded, with one more, has less work than the most loaded."""
    return min(each.load + each.cost for each in workers) < max(each.load for each in workers)


def _migrate_one(engine: Engine, stage: int, delta: int, *, guarded: bool) -> bool:
    """Whether a micro-batch moved."""
    workers = _workers(engine, stage)
    fastest = max(workers, key=lambda each: (each.num_forward, -each.team.members[0]))
    giving = [
        each
        for each in workers
        if each is not fastest
        and not (guarded and fastest.load + fastest.cost >= each.load)
        and engine.next_pending(each) is not None
    ]
    if not giving:
        return False
    slowest = min(giving, key=lambda each: (each.num_forward, each.team.members[0]))
    if fastest.num_forward - slowest.num_forward <= delta or not fastest.has_room:
        return False
    engine.move_next(slowest.team.members[0], stage, fastest.team.members[0])
    return True


def _workers(engine: Engine, stage: int) -> list[Worker]:
    """Those that have `stage`, one of each class."""
    return [worker for team in engine.teams if (worker := team.workers[stage]).bound > 0]
