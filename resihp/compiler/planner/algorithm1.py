"""Algorithm 1 of the paper (section 6.3): migration by progress, while the pipelines are played.

The progress of a worker is the number of forwards that it has run. At each step the next pending
micro-batch of the slowest replica of a stage goes to the fastest, if that is more than delta
ahead and has room for it, beside what it was promised before. A step is a moment at which a
forward of the stage has ended: else no progress has changed.

The stages behind a slow one lag as well, though they are not slow, so that much moves for nothing
or back and forth. The guard moves a micro-batch only if the receiver, with it, has less work
assigned than the giver had; who may not give is passed over.
"""

from __future__ import annotations

from resihp.compiler.planner.engine import Engine, Migrate
from resihp.compiler.planner.workers import Worker

__all__ = ["progress_rule"]


def progress_rule(delta: int = 0, *, guarded: bool = True) -> Migrate:
    """The rule, for `Engine(..., migrate=...)`.

    `delta` is the paper's threshold, 0 in its example (figure 6b).
    """
    return _guarded(delta) if guarded else _literal(delta)


def _literal(delta: int) -> Migrate:
    def migrate(engine: Engine, stage: int) -> None:
        workers = _workers(engine, stage)
        _move(engine, min(workers, key=_progress), max(workers, key=_rank), delta)

    return migrate


def _guarded(delta: int) -> Migrate:
    def migrate(engine: Engine, stage: int) -> None:
        if stage not in engine.reloaded:
            return
        workers = _workers(engine, stage)
        if not _can_gain(workers):
            engine.reloaded.remove(stage)
            return
        fastest = max(workers, key=_rank)
        least = fastest.load + fastest.cost
        giving = [each for each in workers if each.load > least and _pending(engine, each)]
        if giving:
            _move(engine, min(giving, key=_progress), fastest, delta)

    return migrate


def _can_gain(workers: list[Worker]) -> bool:
    """Whether the least loaded, with one more, has less work than the most loaded."""
    return min(each.load + each.cost for each in workers) < max(each.load for each in workers)


def _move(engine: Engine, slowest: Worker, fastest: Worker, delta: int) -> None:
    """One micro-batch, if the rule says so."""
    is_ahead = fastest.num_forward - slowest.num_forward > delta
    if is_ahead and _pending(engine, slowest) and fastest.has_room_for_guest:
        home, replica = slowest.team.members[0], fastest.team.members[0]
        engine.move_next(home, slowest.stage, replica)


def _pending(engine: Engine, worker: Worker) -> bool:
    return engine.next_pending(worker) is not None


def _progress(worker: Worker) -> tuple[int, int]:
    """The slowest has the least; of equals it is the first."""
    return worker.num_forward, worker.team.members[0]


def _rank(worker: Worker) -> tuple[int, int]:
    """The fastest has the most; of equals it is the first."""
    return worker.num_forward, -worker.team.members[0]


def _workers(engine: Engine, stage: int) -> list[Worker]:
    """Those that have `stage`, one of each class."""
    return [worker for team in engine.teams if (worker := team.workers[stage]).bound > 0]
