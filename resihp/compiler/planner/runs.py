"""Placings whose moved micro-batches come in runs of numbers, which takes less memory.

Gradients are added along a tree over the numbers of each home, and a sum waits for its sibling. A
worker that runs every second micro-batch of another keeps each sum; one that runs a few in a row
keeps few (`resihp.compiler.facts.peak_partials`).
"""

from __future__ import annotations

from collections import Counter

from resihp.compiler.planner.planned import Item, Placing

__all__ = ["in_runs"]


def in_runs(placing: Placing, num_microbatches: int, length: int) -> dict[Item, dict[int, int]]:
    """As many chunks of each home go to each replica as in `placing`, `length` in a row.

    What a home keeps comes first.
    """
    takers: dict[tuple[int, int], Counter[int]] = {}
    for (home, _), stages in placing.items():
        for stage, taker in stages.items():
            takers.setdefault((home, stage), Counter())[taker] += 1
    found: dict[Item, dict[int, int]] = {}
    for (home, stage), counts in takers.items():
        row = _row(counts, length)
        for number, taker in enumerate(row, num_microbatches - len(row)):
            found.setdefault((home, number), {})[stage] = taker
    return found


def _row(counts: Counter[int], length: int) -> list[int]:
    """Takers of numbers that follow each other: each in turn, for `length` of them."""
    left = dict(sorted(counts.items()))
    row: list[int] = []
    while left:
        for taker, count in list(left.items()):
            row += [taker] * min(count, length)
            left[taker] = count - length
            if left[taker] <= 0:
                del left[taker]
    return row
