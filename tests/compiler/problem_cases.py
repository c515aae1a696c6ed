"""Problems for the planner: healthy, slow, missing and tight stages."""

from __future__ import annotations

import random

from resihp.compiler.planner.problem import Capacity, Chunks, Problem, Replica

ROOMY = Capacity(free=10**9, activation=1, released=1, held=0)


def replica(
    num_stages: int,
    chunks: tuple[int, int, int] = (100, 100, 100),
    *,
    slow: dict[int, float] | None = None,
    dead: tuple[int, ...] = (),
    edge: int = 0,
    memory: Capacity = ROOMY,
) -> Replica:
    """Stages of equal cost, but the slow ones and the dead ones."""
    slow = slow or {}
    return Replica(
        chunks=tuple(
            None if s in dead else Chunks(*(round(ticks * slow.get(s, 1)) for ticks in chunks))
            for s in range(num_stages)
        ),
        memory=tuple(None if s in dead else memory for s in range(num_stages)),
        edges=(edge,) * (num_stages - 1),
    )


def problem(
    rows: list[Replica], num_microbatches: int, *, split: bool = True, edge: int = 0
) -> Problem:
    """With the bounds of ZB-H1 where B and W are split, and of 1F1B where they are not."""
    num_stages = len(rows[0].chunks)
    in_flight = (num_stages,) * num_stages if split else tuple(range(num_stages, 0, -1))
    return Problem(
        replicas=tuple(rows),
        num_microbatches=num_microbatches,
        crossing=(2 * edge,) * (num_stages - 1),
        split=split,
        in_flight=in_flight,
    )


def random_problem(rng: random.Random) -> Problem:
    """Up to four stages and five replicas, some slow, some without a stage, memory tight or not."""
    num_stages, num_replicas = rng.randint(1, 4), rng.randint(1, 5)
    kinds = [
        replica(
            num_stages,
            (rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 9)),
            slow={rng.randrange(num_stages): rng.choice((1, 1.5, 2))},
            edge=rng.choice((0, 3)),
            memory=rng.choice((ROOMY, Capacity(2 + 3 * num_stages, 3, 2, 1))),
        )
        for _ in range(2)
    ]
    rows = [rng.choice(kinds) for _ in range(num_replicas)]
    for stage in range(num_stages):
        if num_replicas > 1 and rng.random() < 0.3:
            hit = rng.randrange(num_replicas)
            rest = [d for d in range(num_replicas) if d != hit and rows[d].chunks[stage]]
            if rest:
                rows[hit] = Replica(
                    (*rows[hit].chunks[:stage], None, *rows[hit].chunks[stage + 1 :]),
                    (*rows[hit].memory[:stage], None, *rows[hit].memory[stage + 1 :]),
                    rows[hit].edges,
                )
    return problem(
        rows, rng.randint(1, 6), split=rng.random() < 0.5, edge=rng.choice((0, 2))
    )._replace(in_flight=rng.choice((None, (2,) * num_stages)))
