"""Where a job stands."""

from __future__ import annotations

import enum

__all__ = ["Phase"]


class Phase(enum.Enum):
    """Of the coordinator."""

    STARTING = "starting"
    SETTLING = "settling"
    OPENING = "opening"
    RUNNING = "running"
    STOPPING = "stopping"
