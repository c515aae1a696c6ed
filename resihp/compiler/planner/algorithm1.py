"""Algorithm 1 of the paper (section 6.3): migration by progress, while the pipelines are played.

The progress of a worker is the number of forwards that it has run. Where the fastest replica of a
stage is more than delta ahead of the slowest, the next pending micro-batch of the slowest goes to
the fastest, if memory allows.

Read literally this cascades: the stages behind a slow one lag as well, though they are not slow,
and nearly everything moves. The guard moves a micro-batch only if the receiver, with it, has less
work assigned than the giver had.
"""

from __future__ import annotations

from collections.abc import Callable

from resihp.compiler.planner.engine import Engine, Team
from resihp.compiler.planner.problem import total

__all__ = ["progress_rule"]


def progress_rule(delta: int = 0, *, guarded: bool = True) -> Callable[[Engine, int], None]:
    """The rule, for `Engine(..., migrate=...)`."""

    def migrate(engine: Engine, stage: int) -> None:
        while _migrate_one(engine, stage, delta, guarded=guarded):
            pass

    return migrate


def _migrate_one(engine: Engine, stage: int, delta: int, *, guarded: bool) -> bool:
    """Whether a micro-batch moved."""
    teams = _teams(engine, stage)
    fastest = max(teams, key=lambda team: (team.num_forward[stage], -team.members[0]))
    giving = [
        team
        for team in teams
        if team is not fastest
        and engine.next_pending(team, stage) is not None
        and (not guarded or _is_better(engine, team, fastest, stage))
    ]
    if not giving:
        return False
    slowest = min(giving, key=lambda team: (team.num_forward[stage], team.members[0]))
    if fastest.num_forward[stage] - slowest.num_forward[stage] <= delta:
        return False
    if not engine.has_room(fastest, stage):
        return False
    engine.move_next(slowest.members[0], stage, fastest.members[0])
    return True


def _teams(engine: Engine, stage: int) -> list[Team]:
    """The classes that have `stage`, each once."""
    distinct = {id(team): team for team in engine.teams.values()}
    rows = engine.problem.replicas
    return [team for team in distinct.values() if rows[team.members[0]].chunks[stage] is not None]


def _is_better(engine: Engine, giver: Team, taker: Team, stage: int) -> bool:
    cost = total(engine.chunks(taker.members[0], stage))
    return taker.load[stage] + cost < giver.load[stage]
