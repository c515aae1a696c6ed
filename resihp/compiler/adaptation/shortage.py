"""Why nothing fits into memory, in one sentence."""

from __future__ import annotations

from resihp.compiler.adaptation.candidates import candidates
from resihp.compiler.adaptation.problems import capacity_of
from resihp.compiler.adaptation.situation import Situation
from resihp.compiler.sources import spell_layers
from resihp.ir.model import Group

__all__ = ["memory_shortage"]


def memory_shortage(situation: Situation) -> str:
    """The group of the first layout that is worst off, what it needs and what a device has."""
    device = situation.previous.memory_bytes
    assert device is not None, "memory is short only where a plan states it"
    groups = candidates(situation)[0].layout.groups
    group = max(groups, key=lambda group: (_needed_bytes(situation, group, device), group.name))
    needed = _needed_bytes(situation, group, device)
    who = f"{group.name} (layers {spell_layers(group)}, TP {group.tp})"
    enough = "" if needed > device else ", and for its share of the work more than that"
    return (
        f"no plan for what is left fits into memory: {who} needs {_mib(needed)} on each rank for "
        f"one micro-batch in flight{enough}; a device has {_mib(device)}"
    )


def _needed_bytes(situation: Situation, group: Group, device: int) -> int:
    """On each member, with one micro-batch in flight at the stage that needs most."""
    rooms = [
        capacity_of(situation, layers, group.tp, recomputes=again)
        for layers, again in zip(group.layers, situation.recomputes(group.pp), strict=True)
    ]
    return sum(device - room.free for room in rooms) + max(
        room.activation + room.held for room in rooms
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"
