"""The fault mix: weights as published, faults as drawn."""

from __future__ import annotations

import random
from collections import Counter

from resihp.chaos.mix import LLAMA_3, drawn


def test_the_weights_are_all_interruptions_that_were_published():
    """419 unexpected ones in 54 days."""
    assert sum(cause.weight for cause in LLAMA_3) == 419


def test_faults_come_as_often_as_their_causes():
    """[T32] Shares of many draws, of the time between them too."""
    draw = random.Random(1)
    strikes = [drawn(draw, 8, 2.0) for _ in range(20_000)]
    counts = Counter(strike.cause for strike in strikes)
    possible = sum(cause.weight for cause in LLAMA_3 if cause.kind is not None)
    for cause in LLAMA_3:
        share = cause.weight / possible if cause.kind is not None else 0.0
        assert abs(counts[cause.name] / 20_000 - share) < 0.015, cause.name
    assert abs(sum(strike.after_s for strike in strikes) / 20_000 - 2.0) < 0.1
    assert {strike.rank for strike in strikes} == set(range(8))


def test_the_same_seed_gives_the_same_faults():
    """A violation can be looked at again."""
    one, two = ([drawn(random.Random(7), 8, 2.0) for _ in range(9)] for _ in range(2))
    assert one == two
