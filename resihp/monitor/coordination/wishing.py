"""What operators want of all ranks while the job trains on: a version saved, replicas compared.

    wished --RUNNING--> asked --vote, all do it--> answered
              ^           |
              +--closed---+

One rank is asked to bring the wish into its next vote, so that all act after the same step. Where
its generation ends first, a rank of the next one is asked. Each wish is answered once: with what
came of it, or with why nothing did. A second one of a kind is the same wish.
"""

from __future__ import annotations

from dataclasses import dataclass

from resihp.checkpoint.versions import parse_name
from resihp.monitor.actions import Answer
from resihp.monitor.checkpoints import SavedVersion
from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.coordination.saving import Saving
from resihp.wire.messages import Audited, Refused, Reply, Request, SaveFailed, What

__all__ = ["Wishing"]

_NOBODY = -1, -1


@dataclass
class _Wish:
    made_s: float
    version: int
    """Steps that were complete: what is done at an older version is no answer."""
    asked: tuple[int, int] = _NOBODY
    """Which rank, in which generation."""
    not_before_s: float = 0.0


class Wishing:
    """Of one job."""

    def __init__(self, core: Core, saving: Saving) -> None:
        self._core = core
        self._saving = saving
        self._open: dict[What, _Wish] = {}

    def wish(self, what: What) -> None:
        """An operator wants `what`; its `Answer` follows, now or later."""
        core = self._core
        refusal = self._refusal(what)
        if refusal:
            core.do(Answer(what, Refused(text=refusal)))
        elif what not in self._open:
            self._open[what] = _Wish(core.now_s, len(core.records))

    def _refusal(self, what: What) -> str:
        """Why there is no use in asking; '' where there is."""
        core = self._core
        if core.phase is Phase.STARTING:
            return "the job has not begun yet"
        if core.phase is Phase.STOPPING or self._saving.ending is not None:
            return "the job is ending"
        if core.job.device.kind == "emulated":
            return f"emulated devices hold no state, so there is nothing to {_VERBS[what]}"
        if what == "checkpoint" and self._saving.at is None:
            return "this job saves nothing"
        return ""

    # --- what comes of it

    def save_failed(self, message: SaveFailed) -> None:
        """A rank could not write its part."""
        self._failed(message.name, message.why, is_busy=message.is_busy)

    def completed(self, name: str, trouble: str) -> None:
        """All parts are there, and the version is complete, or `trouble` says why it is not."""
        if trouble:
            self._failed(name, trouble)

    def _failed(self, name: str, why: str, *, is_busy: bool = False) -> None:
        core, wish = self._core, self._open.get("checkpoint")
        version = parse_name(name)
        if wish is None or version is None or version.step < wish.version:
            return
        if not wish.asked[1] == core.generation == version.generation:
            return  # asked again in the next one
        if is_busy:
            wish.asked, wish.not_before_s = _NOBODY, core.now_s + core.timing.grace_s
        else:
            self._answer("checkpoint", f"version {name} was not saved: {why}", is_bad=True)

    def audited(self, message: Audited) -> None:
        """All replicas were compared; where they differ, the job has been ended."""
        wish = self._open.get("audit")
        if wish is None or message.version < wish.version:
            return
        if message.generation != self._core.generation:
            return
        step, num = message.version, message.num_shards
        if message.differing:
            found = "; ".join(message.differing)
            self._answer("audit", f"step {step}: replicas differ: {found}", is_bad=True)
        elif num == 0:
            self._answer("audit", f"step {step}: each shard has one holder, nothing was compared")
        else:
            self._answer("audit", f"step {step}: all replicas of {num} shards are equal")

    # --- its course

    def check(self) -> None:
        """After whatever happened: ask who is to be asked, and answer what can be answered."""
        core, saved = self._core, self._saving.versions
        for wish in self._open.values():
            wish.version = min(wish.version, len(core.records))  # all may have gone back
        wish = self._open.get("checkpoint")
        if wish is not None and saved and saved[0].step >= wish.version:
            self._answer("checkpoint", _saved(saved[0]))
        for what, wish in list(self._open.items()):
            if core.phase is Phase.STOPPING:
                if what != "checkpoint" or not self._saving.completes(wish.version):
                    self._refuse(what, f"the job ended first: {core.reason}")
            elif core.now_s - wish.made_s > core.timing.wish_s:
                waited_s, doing = core.timing.wish_s, core.phase.value
                told = f"not done within {waited_s:.0f} s (the job is {doing}: see `resihp where`)"
                self._refuse(what, told)
            elif core.phase is Phase.RUNNING:
                self._ask(what, wish)

    def stood_still(self, slept_s: float) -> None:
        """This process did, for `slept_s`: whoever waits has so much longer."""
        for wish in self._open.values():
            wish.made_s += slept_s

    def _ask(self, what: What, wish: _Wish) -> None:
        core = self._core
        if wish.asked[1] == core.generation or core.now_s < wish.not_before_s:
            return
        assert core.plan is not None
        wish.asked = min(core.plan.plan.active_ranks), core.generation
        core.log("asked", what=what, rank=wish.asked[0], generation=core.generation)
        core.send(wish.asked[0], Request(generation=core.generation, what=what))

    def repeat(self, rank: int) -> None:
        """What `rank` was asked for, again: it, or what came of it, may be lost."""
        core = self._core
        for what, wish in self._open.items():
            if wish.asked == (rank, core.generation):
                core.send(rank, Request(generation=core.generation, what=what))

    def _answer(self, what: What, text: str, *, is_bad: bool = False) -> None:
        del self._open[what]
        self._core.do(Answer(what, Reply(text=text, is_bad=is_bad)))

    def _refuse(self, what: What, text: str) -> None:
        del self._open[what]
        self._core.do(Answer(what, Refused(text=text)))


_VERBS = {"checkpoint": "save", "audit": "compare"}


def _saved(version: SavedVersion) -> str:
    size = f"{version.num_bytes / 2**20:.1f} MiB"
    return f"step {version.step}: saved as version {version.name}, {size}"
