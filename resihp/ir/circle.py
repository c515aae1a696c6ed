"""A shortest circle among those who wait for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import TypeVar

__all__ = ["shortest_circle"]

_T = TypeVar("_T")


def shortest_circle(waits: Mapping[_T, Collection[_T]]) -> list[_T]:
    """Each of it waits for the next one, the last for the first; empty where there is none.

    Of several that are as short the one of the first in `waits`.
    """
    found: list[_T] = []
    for start in waits:
        circle = _back_to(start, waits)
        if circle and (not found or len(circle) < len(found)):
            found = circle
    return found


def _back_to(start: _T, waits: Mapping[_T, Collection[_T]]) -> list[_T]:
    """A shortest way from `start` back to it."""
    came_from: dict[_T, _T] = {}
    unseen = deque([start])
    while unseen:
        here = unseen.popleft()
        for target in waits.get(here, ()):
            if target == start:
                path = [here]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if target not in came_from:
                came_from[target] = here
                unseen.append(target)
    return []
