"""What comes of what happens to a coordinator's lead."""

from __future__ import annotations

from typing import NamedTuple

from resihp.wire.quorum import Entry, Lead, Leads, Propose

__all__ = ["Awake", "Decided", "Deposed", "Followed", "NodeLost", "Outcome", "ToNode", "Won"]


class ToNode(NamedTuple):
    """Send `message` to the monitor of `node`."""

    node: int
    message: Lead | Propose | Leads


class Won(NamedTuple):
    """This coordinator leads; `newest` is what the one before had decided, None at the start."""

    newest: Entry | None


class Awake(NamedTuple):
    """This coordinator stood still and leads nevertheless: for `slept_s` nobody else was late."""

    slept_s: float


class Followed(NamedTuple):
    """The monitor of `node` obeys us on a connection that is new: tell it all it needs."""

    node: int


class Decided(NamedTuple):
    """A quorum accepted the entry that was proposed."""

    entry: Entry


class NodeLost(NamedTuple):
    """A node is out of reach: all its ranks are lost, once a quorum decides so."""

    node: int
    evidence: str


class Deposed(NamedTuple):
    """This coordinator must do nothing more, and end."""

    why: str


Outcome = ToNode | Won | Awake | Followed | Decided | NodeLost | Deposed
