"""A plan played under its own transport, as `show` and `diff` tell its time."""

from __future__ import annotations

from collections.abc import Mapping

from resihp.ir.lanes import Lane
from resihp.ir.model import GroupName, Plan
from resihp.ir.program import boundary_type
from resihp.ir.timeline import Timeline, play
from resihp.ir.transport import EDGE, parse_transport

__all__ = ["play_back"]


def play_back(plan: Plan, lanes: Mapping[GroupName, Lane]) -> Timeline:
    """`lanes` of `plan` at unit costs, under the transport that it names, or else `edge`."""
    transport = EDGE if plan.transport is None else parse_transport(plan.transport)
    sent = boundary_type(plan).num_bytes
    return play(lanes, transport=transport, boundary_bytes=dict.fromkeys(lanes, sent))
