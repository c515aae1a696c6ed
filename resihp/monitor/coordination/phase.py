"""Where a job stands."""

from __future__ import annotations

import enum

__all__ = ["Phase"]


class Phase(enum.Enum):
    """Of the coordinator."""

    STARTING = "starting"
    RESUMING = "resuming"
    SETTLING = "settling"
    PROPOSING = "proposing"
    OPENING = "opening"
    RUNNING = "running"
    SAVING = "saving"
    STOPPING = "stopping"
