"""A plan played for a picture: its times, and what memory it needs where it is sound."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from resihp.ir.drawing.scene import Played
    from resihp.ir.source import Parsed

__all__ = ["played_of"]

_UNITS = "units of time: F, B and W 1, BW 2, transfers 0"


def played_of(args: argparse.Namespace, parsed: Parsed) -> Played:
    """The run of a plan as the command line describes it.

    A plan with errors is played in units of time and without its memory.
    """
    from resihp.compiler.facts import facts_of
    from resihp.ir.drawing.memory import memory_curves
    from resihp.ir.drawing.scene import Clock, Played
    from resihp.ir.lanes import alike, lanes_of
    from resihp.ir.playback import play_back
    from resihp.ir.verify import has_errors, verify

    plan = parsed.plan
    kinds = alike(plan)
    lanes = lanes_of(plan, kinds.keys())
    timeline = play_back(plan, lanes)
    if has_errors(verify(parsed)):
        note = f"{_UNITS}; the plan has errors: see `resihp verify`"
        return Played(plan, lanes, timeline, Clock("unit", note), kinds)
    return Played(
        plan=plan,
        lanes=lanes,
        timeline=timeline,
        clock=Clock("unit", _UNITS),
        kinds=kinds,
        memory=memory_curves(lanes, timeline, facts_of(plan)),
        capacity_bytes=plan.memory_bytes,
    )
