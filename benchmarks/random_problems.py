"""Random failure states for the planner: stages that are lost, slow or short of memory."""

from __future__ import annotations

import random
from typing import NamedTuple

from resihp.compiler.planner.problem import Capacity, Chunks, Problem, Replica


class Sizes(NamedTuple):
    """Ranges of a family of problems, both ends included."""

    stages: tuple[int, int]
    replicas: tuple[int, int]
    microbatches: tuple[int, int]


SMALL = Sizes((1, 3), (1, 2), (1, 4))
LARGER = Sizes((3, 4), (2, 4), (4, 8))

_ACTIVATION, _RELEASED, _HELD = 4, 3, 1
_SLOW = (1.0, 1.0, 1.0, 1.25, 1.5, 2.0, 3.0)


def random_problem(seed: str, sizes: Sizes) -> Problem:
    """The problem of `seed`: the same wherever it is made."""
    rng = random.Random(seed)
    num_stages, num_microbatches = rng.randint(*sizes.stages), rng.randint(*sizes.microbatches)
    num_replicas = max(rng.randint(*sizes.replicas), rng.randint(*sizes.replicas))
    base = rng.randint(8, 12), rng.randint(8, 14), rng.randint(6, 10)
    edge = rng.choice((0, 0, 1, 2, 4))
    free = _free_bytes(rng, num_stages)
    lost = _lost(rng, num_stages, num_replicas)
    split = rng.random() < 0.7
    in_flight = (num_stages,) * num_stages if split else tuple(range(num_stages, 0, -1))
    rows = [
        _replica(rng, base, free, {s for s, d in lost if d == replica}, edge)
        for replica in range(num_replicas)
    ]
    return Problem(
        replicas=tuple(rows),
        num_microbatches=num_microbatches,
        crossing=(edge * rng.choice((1, 2, 3)),) * (num_stages - 1),
        split=split,
        in_flight=in_flight,
    )


def _free_bytes(rng: random.Random, num_stages: int) -> list[int]:
    """Of each stage: room for one micro-batch, for about as many as 1F1B keeps, or for all."""
    if rng.random() < 0.4:
        return [10**6] * num_stages
    return [
        _HELD + _ACTIVATION * rng.randint(1, num_stages + 1) + rng.randint(0, 2)
        for _ in range(num_stages)
    ]


def _lost(rng: random.Random, num_stages: int, num_replicas: int) -> list[tuple[int, int]]:
    """(stage, replica) that are gone; some replica keeps each stage."""
    if num_replicas == 1 or rng.random() < 0.4:
        return []
    stages = rng.sample(range(num_stages), rng.randint(1, min(2, num_stages)))
    return [(stage, rng.randrange(num_replicas)) for stage in stages]


def _replica(
    rng: random.Random, base: tuple[int, int, int], free: list[int], lost: set[int], edge: int
) -> Replica:
    chunks: list[Chunks | None] = []
    memory: list[Capacity | None] = []
    for stage, room in enumerate(free):
        factor = rng.choice(_SLOW)
        is_lost = stage in lost
        chunks.append(None if is_lost else Chunks(*(round(ticks * factor) for ticks in base)))
        memory.append(None if is_lost else Capacity(room, _ACTIVATION, _RELEASED, _HELD))
    return Replica(tuple(chunks), tuple(memory), (edge,) * (len(free) - 1))
