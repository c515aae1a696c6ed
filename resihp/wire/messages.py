"""Every message of the side channel, as typed MessagePack.

A rank's supervisor relays between its executor and the coordinator, so one union serves both
hops. Whatever belongs to a generation carries its number; anything older is dropped.
Times are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from resihp.errors import FrameError
from resihp.wire.address import LOOPBACK, Address
from resihp.wire.auth import masked_repr

__all__ = [
    "FATAL",
    "AskClock",
    "AskStop",
    "AskWhere",
    "At",
    "Audited",
    "Beat",
    "ClockAt",
    "Close",
    "Commit",
    "Deploy",
    "Emulation",
    "ExecutorExited",
    "ExecutorStarted",
    "Fault",
    "Fence",
    "Finished",
    "Go",
    "HeldSums",
    "Hello",
    "Inject",
    "Joined",
    "KeptSums",
    "KillRank",
    "Message",
    "NoBuddyCopy",
    "Observed",
    "PartSaved",
    "Pause",
    "Positions",
    "Ready",
    "Refused",
    "Reply",
    "Request",
    "Resend",
    "Resent",
    "Respawn",
    "Save",
    "SaveAt",
    "SaveFailed",
    "Sealed",
    "Settled",
    "Start",
    "StepDone",
    "StepRecord",
    "Stop",
    "StoreAt",
    "StoreOpened",
    "Trouble",
    "VersionRefused",
    "Welcome",
    "What",
    "Wish",
    "decode",
    "decode_as",
    "encode",
]


class _Message(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the vote told every member about one finished iteration."""

    step: int
    loss: float
    """Mean cross-entropy per target token over the global batch."""
    grad_norm: float
    learning_rate: float
    skipped: bool
    """True where gradients were not finite and all ranks skipped the update together."""
    num_tokens: int
    samples: tuple[int, ...]
    """Sample ids in global micro-batch order, as the ranks that computed the loss read them."""
    duration_s: float
    emulated: bool = False
    """Nothing was computed: there is no loss, and the time is a planned one."""
    snapshot: bool = False
    """Whether all members keep the version after it in shared memory."""

    @classmethod
    def empty(cls, step: int) -> StepRecord:
        """Of an iteration that nobody trained in: it says nothing but its step."""
        return cls(
            step=step,
            loss=0.0,
            grad_norm=0.0,
            learning_rate=0.0,
            skipped=False,
            num_tokens=0,
            samples=(),
            duration_s=0.0,
        )

    @property
    def is_empty(self) -> bool:
        """Whether it is of an iteration that this run does not know."""
        return self == StepRecord.empty(self.step)


# --- supervisor -> coordinator


class Hello(_Message, frozen=True, kw_only=True):
    """The first message of a supervisor on each connection."""

    pid: int
    """Its own process number."""
    has_executor: bool = True
    """False: it was started again and waits for `Respawn`."""


class AskStop(_Message, frozen=True, kw_only=True):
    """The supervisor was told by a signal to end the job."""

    reason: str
    exit_code: int


class ExecutorStarted(_Message, frozen=True, kw_only=True):
    """The supervisor started its executor."""

    pid: int


class ExecutorExited(_Message, frozen=True, kw_only=True):
    """The executor is gone. `code` is negative for a signal; `last_words` ends its log."""

    code: int
    last_words: str
    pid: int = 0
    """Which one it was; 0: not said."""
    fenced: str = ""
    """Why its supervisor killed it; empty: it did not."""
    hit_s: float | None = None
    """When the fault that it died of was announced, or its supervisor saw it stopped."""
    seen_s: float | None = None
    """When its supervisor saw its end."""


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """A declared pause: for `reason` a rank makes no progress, for at most `at_most_s`."""

    number: int
    """Counts the pauses of a process."""
    reason: str
    at_most_s: float


class Beat(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Liveness from the supervisor, with the executor's last reported progress."""

    step: int
    instruction: int
    pause: Pause | None = None
    generation: int = 0
    """The newest that the executor was told of."""
    runs: bool = False
    """It was told to go in `generation`: it iterates, or stands by."""
    pid: int = 0
    """The executor that this is of; 0: there is none."""


class Resent(_Message, frozen=True, kw_only=True):
    """Answer to `Resend`, before all that is said again: what came earlier may have gaps."""

    has_executor: bool = True
    """Whether there is one to speak for; a supervisor that was started again has none."""


# --- executor -> coordinator


class Ready(_Message, frozen=True, kw_only=True):
    """The executor can be deployed to. Peers reach its transport at `address`."""

    address: Address
    dataset_digest: str
    num_samples: int
    num_skipped_files: int
    """Files of the source that could not be read."""


class StoreOpened(_Message, frozen=True, kw_only=True):
    """The store of this generation listens at `address`."""

    generation: int
    address: Address


class Trouble(_Message, frozen=True, kw_only=True):
    """The executor saw something break. A hint only: the verdict is the coordinator's."""

    generation: int
    what: str


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A complete snapshot in a node's shared memory: `rank`'s state in a layout at a version."""

    rank: int
    generation: int
    version: int
    updates: int


class NoBuddyCopy(_Message, frozen=True, kw_only=True):
    """From here on in a generation, no copy of the sender's snapshots is made at its buddy."""

    generation: int
    buddy: int
    why: str


class HeldSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of complete weight gradients that a rank has of one stage of an interrupted iteration.

    Each set is one sum, by the numbers of its micro-batches in the global batch (home replica times
    micro-batches of a replica, plus number).
    """

    stage: int
    sets: tuple[tuple[int, ...], ...]


class KeptSums(msgspec.Struct, frozen=True, kw_only=True):
    """What the group of `replica` at `stage` keeps, by numbers in the global batch."""

    stage: int
    replica: int
    microbatches: tuple[int, ...]


class Settled(_Message, frozen=True, kw_only=True):
    """The executor left its generation and says which state it holds.

    `version` counts the completed steps, `voted` those whose vote it saw complete (it then has
    the reduced gradients of step `voted - 1` and `record` of it). `layouts` lists the generations
    whose layout it can continue from.
    """

    generation: int
    version: int
    voted: int
    updates: int
    """Optimizer updates applied by `version` (skipped steps do not count)."""
    record: StepRecord | None
    layouts: tuple[int, ...]
    noticed_s: float
    snapshots: tuple[Sealed, ...] = ()
    """All that its node's memory holds, of whatever rank."""
    held_step: int = -1
    """The iteration of which it has `held`; -1: none."""
    held_layout: int = -1
    """The generation whose layout `held` has."""
    held: tuple[HeldSums, ...] = ()
    """By stage of the plan that ran."""


class PartSaved(_Message, frozen=True, kw_only=True):
    """This rank's part of version `name` is on disk, under names that follow from the rank."""

    generation: int
    name: str
    version: int
    """Completed steps."""
    updates: int
    loss: float | None
    """Of the last step; None where nothing finite is known."""
    part_bytes: int
    part_sha256: str
    data_bytes: int
    stalled_s: float
    """How long the copy held up this rank's communication stream."""
    took_s: float
    """From the end of the step until all was on disk."""


class SaveFailed(_Message, frozen=True, kw_only=True):
    """This rank could not write its part of version `name`; training goes on."""

    generation: int
    name: str
    why: str
    is_busy: bool = False
    """It still writes the version before: asked again later, it may do it."""


class VersionRefused(_Message, frozen=True, kw_only=True):
    """This rank was told to load version `name`, and it is damaged or of another job."""

    generation: int
    name: str
    why: str
    is_other_model: bool = False
    """It is intact, and older ones are of that model too: the job cannot begin."""


class Joined(_Message, frozen=True, kw_only=True):
    """Groups are built and state is in place; `hashes` maps a shard's name to its digest."""

    generation: int
    hashes: dict[str, str]
    moved_bytes: int


class Observed(_Message, frozen=True, kw_only=True):
    """When each instruction of an iteration began and ended on this rank.

    64-bit integers by index into the program, ns of the device's clock; 0: did nothing.
    """

    generation: int
    step: int
    starts_ns: bytes
    ends_ns: bytes


class StepDone(_Message, frozen=True, kw_only=True):
    """One iteration is committed on this rank."""

    generation: int
    record: StepRecord
    observed: Observed | None = None
    """The newest times that are complete, where they have not been told: a message less."""


class Audited(_Message, frozen=True, kw_only=True):
    """All replicas were compared at `version`; every member found the same."""

    generation: int
    version: int
    differing: tuple[str, ...]
    """Tensors whose replicas are not equal, with their ranks; the first few."""
    num_shards: int
    """Of parameters and moments, that were compared with those of other ranks."""


class At(_Message, frozen=True, kw_only=True):
    """Where the executor is, as an answer to `AskWhere`.

    Instructions are indices into the rank's program, -1: none.
    """

    generation: int
    runs: bool
    """It runs iterations; if not, `doing` says what it does, and the rest says nothing."""
    doing: str
    step: int = -1
    compute: int = -1
    """Head of the compute stream."""
    compute_waits: bool = False
    """The head is not running: its inputs are not there."""
    comm: int = -1
    """Head of the communication stream: gathers, reductions, votes."""
    comm_waits: bool = False
    receives: tuple[int, ...] = ()
    """Missing receives that one of the two heads waits for."""
    collectives: int = -1
    """Collectives of its TP group that the compute stream has entered; -1: not counted."""
    since_s: float = 0.0
    """How long nothing of this has changed, seen at every beat."""
    pause: Pause | None = None


class Finished(_Message, frozen=True, kw_only=True):
    """The executor completed the last step of the job."""

    generation: int


FATAL = ("kill", "stopped", "exit", "exception", "kill_supervisor")
"""Kinds of faults after which a rank is lost at once: its detection is measured from them."""


class Fault(_Message, frozen=True, kw_only=True):
    """What is about to hit or has hit this rank, and when: its detection is measured from here.

    Sent by an executor that comes to the place of an injection, and by a supervisor that fences a
    stopped executor or was told by an operator to bring a fault about. Whoever it passes and
    whom its kind names (supervisor, monitor, coordinator) carries it out after sending it on.
    """

    kind: str
    step: int
    instruction: int
    at_s: float
    number: int = -1
    """Which `[[inject]]` of the job it is; -1: none of them."""


# --- coordinator -> supervisor or executor


class Welcome(_Message, frozen=True, kw_only=True):
    """The first message to a supervisor: the run's directory and the job (resolved TOML)."""

    run_dir: str
    job: str


class Start(_Message, frozen=True, kw_only=True):
    """The first message to an executor, from its supervisor."""

    rank: int
    job: str
    host: str = LOOPBACK
    """Address of the node: the only interface on which the executor listens."""
    struck: dict[int, int] = {}
    """The last step that each injection struck an earlier executor of this rank in."""
    run: str = ""
    """Name of the run's directory, which that of its snapshots has too."""


class Close(_Message, frozen=True, kw_only=True):
    """Leave the running generation and settle for `generation`."""

    generation: int


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The version that all survivors settle on, and how to roll forward to it."""

    version: int
    updates: int
    record: StepRecord | None
    saved: str = ""
    """Name of the saved version that generation 0 stands for; empty: untrained parameters."""


class Emulation(msgspec.Struct, frozen=True, kw_only=True):
    """How long everything takes on emulated devices."""

    seconds: dict[str, tuple[float, ...]]
    """Of every instruction of each group's stream, by the group's name."""
    move_s: float
    """Until the state that a plan moves is where it belongs."""
    moved_bytes: int
    """Of all ranks."""


class SaveAt(msgspec.Struct, frozen=True, kw_only=True):
    """Where versions of the state are saved."""

    directory: str
    run: str
    """Name of the run, which names of its versions are made of."""


class Save(_Message, frozen=True, kw_only=True):
    """Nobody runs: write the state of `commit` in the layout of generation `base` to disk."""

    generation: int
    base: int
    commit: Commit
    plan: str
    """Of generation `base`."""
    alive: tuple[int, ...]
    """Who writes."""
    at: SaveAt


class Deploy(_Message, frozen=True, kw_only=True):
    """A verified plan and how to get there from the layout of generation `base`."""

    generation: int
    plan: str
    previous_plan: str | None
    base: int
    commit: Commit
    peers: dict[int, Address]
    """Where the transport of each live rank listens, standby ones included."""
    key: bytes
    """Authenticates the transport connections of this generation."""
    store_rank: int
    program: bytes = b""
    """What this rank runs, as `resihp.ir.program_bytes` has it; empty: it stands by."""
    emulated: Emulation | None = None
    """None on real devices."""
    save_at: SaveAt | None = None
    """None: this job saves nothing."""
    kept: tuple[KeptSums, ...] = ()
    """Where the gradients lie that the `resume` line of the plan keeps."""
    steady_plan: str = ""
    """What the same groups run after the iteration that `plan` redoes; empty: `plan` itself."""
    steady_program: bytes = b""
    """What this rank runs of it."""

    def __repr__(self) -> str:
        return masked_repr(self, "key")


class StoreAt(_Message, frozen=True, kw_only=True):
    """The store of `generation` listens at `address`."""

    generation: int
    address: Address


class Go(_Message, frozen=True, kw_only=True):
    """Everybody joined: drop older layouts and run."""

    generation: int


class AskWhere(_Message, frozen=True, kw_only=True):
    """The executor is to say where it is (`At`). To the coordinator: `resihp where` asks it."""


class Request(_Message, frozen=True, kw_only=True):
    """Bring `what` into the next vote of `generation`: all ranks do it after the same step.

    To any one rank of the plan. `yield`: leave the generation there and settle for the next one,
    as for a `Close`, but with no iteration lost.
    """

    generation: int
    what: Literal["yield", "checkpoint", "audit"]


class Fence(_Message, frozen=True, kw_only=True):
    """The supervisor must SIGKILL its executor."""

    reason: str
    pid: int = 0
    """The executor that is meant: another one lives on; 0: whichever runs."""


class Respawn(_Message, frozen=True, kw_only=True):
    """The supervisor must start a fresh executor in the place of `after`, which is killed first
    where it still runs; one that has another executor has obeyed already."""

    after: int = 0
    """Process number of the newest executor that is known; 0: of none."""


class Resend(_Message, frozen=True, kw_only=True):
    """The supervisor must say again what its executor said last, steps from `from_step` on."""

    from_step: int


class Stop(_Message, frozen=True, kw_only=True):
    """The job is over; everybody ends with `exit_code`."""

    reason: str
    exit_code: int


# --- operator <-> coordinator


class KillRank(_Message, frozen=True, kw_only=True):
    """`resihp kill`: SIGKILL the executor of `rank`."""

    rank: int


class Inject(_Message, frozen=True, kw_only=True):
    """`resihp inject`: bring a fault about; goes on to the supervisor and executor of `rank`."""

    rank: int | None
    """None: of nobody; the coordinator finds who passes it on."""
    fault: dict[str, str | int | float]
    """The keys of an `[[inject]]`, without its place; checked by whoever carries it out."""


What = Literal["checkpoint", "audit"]
"""What all ranks may be asked to do between two iterations while they train on."""


class Wish(_Message, frozen=True, kw_only=True):
    """`resihp save` and `resihp audit`: have all ranks do it after their next vote (`Request`).

    Whoever asks twice, or again after nobody could answer, gets the same answer.
    """

    what: What


class AskClock(_Message, frozen=True, kw_only=True):
    """`resihp doctor`: what time it is at a monitor, which answers itself."""


class ClockAt(_Message, frozen=True, kw_only=True):
    """The wall clock of a node, in seconds since 1970."""

    wall_s: float


class Reply(_Message, frozen=True, kw_only=True):
    """The operator's request was carried out."""

    text: str
    is_bad: bool = False
    """What came of it, or was found, is bad news."""


class Positions(_Message, frozen=True, kw_only=True):
    """Where all ranks are, for the operator."""

    generation: int
    phase: str
    alive: tuple[int, ...]
    at: dict[int, At]
    """Of the ranks that answered in time."""
    heard_s: dict[int, float]
    """How long ago each rank's supervisor was heard."""
    beats: dict[int, Beat]
    """The last one of each rank."""
    out: dict[int, str] = {}
    """What becomes of each rank that is lost."""


class Refused(_Message, frozen=True, kw_only=True):
    """The operator's request cannot be carried out; `text` says why."""

    text: str


Message = (
    Hello
    | AskStop
    | Resent
    | ExecutorStarted
    | ExecutorExited
    | Beat
    | Ready
    | StoreOpened
    | Trouble
    | NoBuddyCopy
    | Settled
    | Joined
    | PartSaved
    | SaveFailed
    | VersionRefused
    | StepDone
    | Audited
    | Observed
    | At
    | Finished
    | Fault
    | Welcome
    | Start
    | Close
    | Deploy
    | Save
    | StoreAt
    | Go
    | AskWhere
    | Request
    | Fence
    | Respawn
    | Resend
    | Stop
    | KillRank
    | Inject
    | Wish
    | AskClock
    | ClockAt
    | Reply
    | Positions
    | Refused
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises on bytes that are not of the schema; the last on endless nesting."""
_T = TypeVar("_T")


def encode(message: object) -> bytes:
    """A message (or handshake Struct) as bytes."""
    return _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """The message in `payload`; FrameError where it is none."""
    try:
        return _decoder.decode(payload)
    except _MALFORMED as error:
        raise FrameError(f"not a message of the side channel: {error}") from error


def decode_as(payload: bytes, kind: type[_T]) -> _T:
    """A handshake Struct in `payload`; FrameError where it is none."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except _MALFORMED as error:
        raise FrameError(f"not a {kind.__name__} frame: {error}") from error
