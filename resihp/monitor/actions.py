"""What the coordinator wants done: it decides, the server around it acts."""

from __future__ import annotations

import msgspec

from resihp.checkpoint.manifest import Manifest
from resihp.wire.messages import Message, Observed, Refused, Reply, StepRecord, What
from resihp.wire.quorum import Entry

__all__ = [
    "Action",
    "Answer",
    "Decide",
    "End",
    "Evict",
    "Log",
    "PlanMade",
    "Say",
    "Seen",
    "Send",
    "StepCommitted",
    "StepsTakenBack",
]


class Send(msgspec.Struct, frozen=True):
    """Send a message to one rank's supervisor (which relays it)."""

    rank: int
    message: Message


class Decide(msgspec.Struct, frozen=True):
    """Have a generation decided on, then say so with `Coordinator.decided`.

    The entry lacks what only the lead knows: term, electors and voters.
    """

    entry: Entry


class CompleteVersion(msgspec.Struct, frozen=True):
    """Mark a saved version complete and prune older ones, then call `Coordinator.completed`."""

    name: str
    manifest: Manifest
    spared: tuple[str, ...] = ()
    """Versions that are not to be pruned, nor to be counted on."""


class DropVersion(msgspec.Struct, frozen=True):
    """Remove an unfinished version."""

    name: str


class Evict(msgspec.Struct, frozen=True):
    """SIGKILL a supervisor that no longer answers; the kernel kills its executor with it."""

    rank: int


class Log(msgspec.Struct, frozen=True):
    """Append one event to `events.jsonl`."""

    kind: str
    fields: dict[str, object]


class PlanMade(msgspec.Struct, frozen=True):
    """Keep a verified plan in the run directory, with the reason why it was made."""

    generation: int
    text: str
    cause: str
    steady: str = ""
    """What follows the iteration that the plan redoes; empty: nothing else."""


class StepCommitted(msgspec.Struct, frozen=True):
    """One iteration is committed: a row of `metrics.jsonl` and a line on the console."""

    record: StepRecord
    generation: int


class StepsTakenBack(msgspec.Struct, frozen=True):
    """All went back to `version`: rows of later steps are no history any more."""

    version: int


class Seen(msgspec.Struct, frozen=True):
    """Keep the times of one iteration of one rank; they fit its program."""

    rank: int
    observed: Observed


class Say(msgspec.Struct, frozen=True):
    """Print one line on the console."""

    line: str


class Answer(msgspec.Struct, frozen=True):
    """Tell all operators that asked for `what`."""

    what: What
    answer: Reply | Refused


class End(msgspec.Struct, frozen=True):
    """The job is over; every supervisor was told."""

    exit_code: int
    reason: str


Action = (
    Send
    | Decide
    | CompleteVersion
    | DropVersion
    | Evict
    | Log
    | PlanMade
    | StepCommitted
    | StepsTakenBack
    | Seen
    | Say
    | Answer
    | End
)
