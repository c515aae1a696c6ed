"""`[[inject]]`: faults that a job brings about on purpose, and what they may say."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta

from resihp.config.toml import Problem

__all__ = [
    "DEFAULT_DELAY_S",
    "FAULT_KINDS",
    "MOMENTS",
    "FaultKind",
    "Injection",
    "Moment",
    "injection_problems",
    "is_of_a_rank",
    "kinds_with",
    "lasting_kinds",
    "said_only_of",
]

Index = Annotated[int, Meta(ge=0, le=1 << 24)]
FaultKind = Literal[
    "kill",
    "stop",
    "exit",
    "exception",
    "hold_gil",
    "slow",
    "slow_link",
    "late_beats",
    "lost_beats",
    "full_disk",
    "torn_checkpoint",
    "kill_supervisor",
    "kill_monitor",
    "kill_coordinator",
    "hang_monitor",
    "hang_coordinator",
]
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
Moment = Literal["vote", "voted", "update", "groups", "state", "joined"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
DEFAULT_DELAY_S = 0.05
"""By which a slow link or a late beat is late where nothing else is said."""


class Injection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[inject]]`: a fault to bring about, to see the job go on.

    It strikes rank `rank` in iteration `step` right before one instruction, once; with `rate` at
    random places instead.
    """

    kind: FaultKind = "kill"
    """What happens.

    To the rank's executor: `kill` (SIGKILL), `stop` (SIGSTOP, then SIGCONT after `lasts_s`), `exit`
    (it leaves without a word), `exception` (an error in its code), `hold_gil` (no other thread of
    it runs), `slow` (computes slower), `slow_link` (what it sends leaves later), `full_disk` (it
    can write no file of state), `torn_checkpoint` (SIGKILL in the middle of its next one).
    Around it: `late_beats`, `lost_beats`, `kill_supervisor`, `kill_monitor` (of its node),
    `kill_coordinator`, `hang_monitor` and `hang_coordinator` (their event loop stands still), all
    when the executor comes to the place.
    """
    rank: Index | None = None
    step: Index | None = None
    instruction: Index | None = None
    """Index into the rank's program at which it strikes (None: the middle).

    Refused where the first plan's is shorter; where a later plan's is, it strikes at its end."""
    moment: Moment | None = None
    """Instead of an instruction: in the vote, between vote and update, in the update; or while the
    rank joins the generation that redoes `step`: `groups` (it builds them), `state` (moves it),
    `joined` (waits for the others)."""
    lasts_s: Annotated[float, Meta(gt=0.0, le=1e6)] | None = None
    """How long it lasts (None: for ever)."""
    factor: Annotated[float, Meta(ge=1.0, le=1e3)] | None = None
    """slow: how many times as long an instruction takes (None: 2)."""
    delay_s: Annotated[float, Meta(gt=0.0, le=60.0)] | None = None
    """slow_link, late_beats: how much later a message leaves (None: 0.05)."""
    share: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """lost_beats: the share of beats that is lost (None: all)."""
    rate: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    """Chance of each iteration to be struck: at a random instruction of `rank`, or of a random
    rank."""
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    """Of the random places."""


class _Key(NamedTuple):
    """A key that some kinds have."""

    name: str
    kinds: tuple[FaultKind, ...]


_KEYS = (
    _Key(
        "lasts_s",
        ("stop", "hold_gil", "slow", "slow_link", "late_beats", "lost_beats", "full_disk"),
    ),
    _Key("factor", ("slow",)),
    _Key("delay_s", ("slow_link", "late_beats")),
    _Key("share", ("lost_beats",)),
)


def lasting_kinds() -> tuple[FaultKind, ...]:
    """Kinds that end after `lasts_s`."""
    return kinds_with("lasts_s")


def is_of_a_rank(kind: object) -> bool:
    """Whether it is done to a rank, not to the monitor of a node or to the coordinator."""
    return kind not in ("kill_monitor", "hang_monitor", "kill_coordinator", "hang_coordinator")


def kinds_with(key: str) -> tuple[FaultKind, ...]:
    """The kinds that `key` is said of."""
    return next((each.kinds for each in _KEYS if each.name == key), FAULT_KINDS)


def said_only_of(injection: Injection) -> Iterator[tuple[str, str]]:
    """(key, sentence) of each key that is not said of this kind, and of each that is missing."""
    for key in _KEYS:
        if getattr(injection, key.name) is not None and injection.kind not in key.kinds:
            near = difflib.get_close_matches(injection.kind, key.kinds, n=1, cutoff=0.0)[0]
            yield (
                key.name,
                f'is not said of kind = "{injection.kind}", but of {", ".join(key.kinds)}; '
                f'nearest valid: leave it out, or kind = "{near}"',
            )
    if injection.kind == "hold_gil" and injection.lasts_s is None:
        yield "kind", "needs lasts_s, for how long no other thread runs; nearest valid: lasts_s = 1"


def injection_problems(
    injections: Sequence[Injection], *, world: int, steps: int, restarts: int, device: str
) -> Iterator[Problem]:
    """What is wrong with the faults of a job, each with the nearest valid choice."""
    deaths: set[tuple[int, int | None]] = set()
    for index, injection in enumerate(injections):
        here = f"inject[{index}]"
        yield from _place(injection, here, world, steps)
        for key, wanted in said_only_of(injection):
            yield Problem(f"{here}.{key}", wanted)
        if injection.kind == "slow" and device == "cuda":
            yield Problem(
                f"{here}.kind",
                'is not brought about with device.kind = "cuda", where work only is queued; '
                'nearest valid: "slow_link"',
            )
        if injection.moment is not None and device == "emulated":
            yield Problem(
                f"{here}.moment",
                "is not there on emulated devices, which compute nothing; "
                "nearest valid: leave it out",
            )
        if injection.kind != "kill" or injection.rank is None or injection.step is None:
            continue
        death = injection.rank, None if restarts == 0 else injection.step
        if death in deaths:
            when = "" if restarts == 0 else " in this step"
            yield Problem(f"{here}.rank", f"is killed{when} by an earlier [[inject]] already")
        deaths.add(death)


def _place(injection: Injection, here: str, world: int, steps: int) -> Iterator[Problem]:
    rank, step = injection.rank, injection.step
    if injection.rate is not None:
        for key in ("step", "instruction", "moment"):
            if getattr(injection, key) is not None:
                yield Problem(f"{here}.{key}", "is drawn with rate; leave one of the two out")
    elif rank is None or step is None:
        missing = "rank" if rank is None else "step"
        yield Problem(
            f"{here}.{missing}", "is missing: where it strikes, or rate for random places"
        )
    if injection.moment is not None and injection.instruction is not None:
        yield Problem(f"{here}.moment", "is said instead of instruction; leave one of the two out")
    if rank is not None and rank >= world:
        yield Problem(
            f"{here}.rank",
            f"must be below the number of ranks, tp * pp * dp = {world}; "
            f"nearest valid: {world - 1}",
        )
    if step is not None and step >= steps:
        yield Problem(
            f"{here}.step", f"must be below job.steps ({steps}); nearest valid: {steps - 1}"
        )
