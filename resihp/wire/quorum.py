"""Which coordinator leads, and which membership is decided: what it and the monitors say of that.

A coordinator asks all monitors for the lead under a new term (`Lead`). Each answers with the
newest entry that it has accepted (`Promise`), and from then on refuses older terms. A generation
is decided once a quorum of the voters of the entry before has accepted its `Entry`. Promises and
accepted entries are in the journal of the monitor's node before they are answered.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from resihp.wire.messages import Commit

__all__ = [
    "Accepted",
    "Entry",
    "Lead",
    "Leads",
    "Promise",
    "Propose",
    "QuorumMessage",
    "Superseded",
]

Term = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Node = Annotated[int, Meta(ge=0, le=1 << 20)]
Rank = Annotated[int, Meta(ge=0, le=1 << 20)]
Number = Annotated[int, Meta(ge=0)]
Candidate = Annotated[str, Meta(min_length=1, max_length=64)]


class _QuorumMessage(
    msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True
):
    """Base of all messages here; they travel among those of `resihp.wire.nodes`."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generation: who belongs to it, what it runs, and who decides on the next one."""

    term: Term
    """Of the coordinator that proposed it, or proposed it again when it took over."""
    generation: Term
    electors: tuple[Node, ...]
    """The voters of the entry decided before: a quorum of them decides this one."""
    voters: tuple[Node, ...]
    """Nodes that belong to this generation: they decide on the next."""
    plan: str
    steady_plan: str = ""
    """What runs after the iteration that `plan` redoes; empty: `plan` itself."""
    base: Term
    """The generation whose layout everybody holds before this one opens; 0: none."""
    base_plan: str
    """What generation `base` runs; empty where it is 0."""
    base_steady_plan: str = ""
    """As `steady_plan`, of `base_plan`."""
    waits_for_boundary: bool = False
    """Another partition of the layers waits until the iteration is over that `plan` redoes."""
    commit: Commit
    alive: tuple[Rank, ...]
    lost: tuple[Rank, ...]
    """In the order in which they were lost."""
    cause: str

    @property
    def age(self) -> tuple[int, int]:
        """Of two entries, that with the greater one is newer."""
        return self.term, self.generation


# --- coordinator -> monitor


class Lead(_QuorumMessage, frozen=True, kw_only=True):
    """Asks for the lead under `term`."""

    term: Term
    candidate: Candidate
    """Tells coordinators apart that ask for the same term; random."""
    is_probe: bool = False
    """Only asks whether it would be promised, which changes nothing. Who cannot win finds out so,
    and does not keep a node from following who does."""
    number: Number = 0
    """Comes back with the answer."""


class Propose(_QuorumMessage, frozen=True, kw_only=True):
    """Asks to accept `entry`, whose term is the proposer's."""

    entry: Entry
    candidate: Candidate


class Leads(_QuorumMessage, frozen=True, kw_only=True):
    """The coordinator of `term` leads, and heard a quorum and beat `number` of this node."""

    term: Term
    number: Number


# --- monitor -> coordinator


class Promise(_QuorumMessage, frozen=True, kw_only=True):
    """The coordinator may lead under `term`, as far as this node is concerned."""

    term: Term
    entry: Entry | None
    """The newest that this node accepted."""
    is_probe: bool = False
    """Nothing was promised: it would be."""
    number: Number = 0
    """Of the question."""


class Superseded(_QuorumMessage, frozen=True, kw_only=True):
    """Refused: `promised` is promised to another coordinator."""

    promised: Term
    is_led: bool
    """It is well and was heard here just now, so nobody else is wanted."""


class Accepted(_QuorumMessage, frozen=True, kw_only=True):
    """The entry of `generation` is in the journal of this node."""

    term: Term
    generation: Term


QuorumMessage = Lead | Propose | Leads | Promise | Superseded | Accepted
