"""Which faults strike how often: the interruptions of a public training run, as faults of ours.

The weights are the unexpected interruptions of Llama 3 405B in 54 days on 16,384 GPUs (Llama Team,
"The Llama 3 Herd of Models", arXiv 2407.21783, table 5): 419 in all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from resihp.config import FaultKind

__all__ = ["LLAMA_3", "Cause", "Strike", "drawn"]


class Cause(NamedTuple):
    """A cause of interruptions, and the fault of ours that looks most like it to a job."""

    name: str
    weight: int
    kind: FaultKind | None
    """None: left out, since no fault of ours does this."""
    lasts_s: float | None = None


LLAMA_3 = (
    Cause("faulty GPU", 148, "kill"),
    Cause("GPU HBM3 memory", 72, "kill"),
    Cause("software bug", 54, "exception"),
    Cause("network switch or cable", 35, "slow_link", 1.0),
    Cause("host maintenance", 32, "kill_supervisor"),
    Cause("GPU SRAM memory", 19, "exit"),
    Cause("GPU system processor", 17, "stop"),
    Cause("NIC", 7, "lost_beats", 2.0),
    Cause("NCCL watchdog timeout", 7, "hold_gil", 0.5),
    Cause("silent data corruption", 6, None),
    Cause("GPU thermal interface and sensor", 6, "slow", 2.0),
    Cause("SSD", 3, "full_disk", 2.0),
    Cause("power supply", 3, "kill_supervisor"),
    Cause("server chassis", 2, "kill_supervisor"),
    Cause("IO expansion board", 2, "late_beats", 2.0),
    Cause("dependency", 2, "kill_coordinator"),
    Cause("CPU", 2, "stop", 0.2),
    Cause("system memory", 2, "kill_monitor"),
)
"""Hosts are single ranks here: what takes a server takes the supervisor of a rank with all of its
processes."""


class Strike(NamedTuple):
    """One fault to come."""

    after_s: float
    """Since the one before, or since the job runs."""
    rank: int
    cause: str
    kind: FaultKind
    lasts_s: float | None


def drawn(
    draw: random.Random, world: int, every_s: float, causes: Sequence[Cause] = LLAMA_3
) -> Strike:
    """A random fault, as if faults were independent and `every_s` apart on average."""
    possible = [cause for cause in causes if cause.kind is not None]
    (cause,) = draw.choices(possible, [cause.weight for cause in possible])
    assert cause.kind is not None
    after_s = draw.expovariate(1 / every_s)
    return Strike(after_s, draw.randrange(world), cause.name, cause.kind, cause.lasts_s)
