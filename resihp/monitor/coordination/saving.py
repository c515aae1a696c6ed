"""Saved versions: which are complete, which is being written, and the save before an end.

Ranks write their parts on their own and report them. When all parts of a version are there it is
completed, whatever happened since; when its generation closes before that, it is dropped. Where
the job is to end before its last step, survivors settle, write what they hold, and it ends then.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from resihp.checkpoint.manifest import Manifest, PartFile, Position
from resihp.checkpoint.versions import version_name
from resihp.compiler.sources import State
from resihp.errors import UserError
from resihp.monitor.actions import CompleteVersion, DropVersion
from resihp.monitor.checkpoints import (
    SavedVersion,
    SavePlace,
    position_difference,
    position_of,
    saved_version,
)
from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.phase import Phase
from resihp.wire.messages import Commit, PartSaved, Save, SaveAt, SaveFailed, VersionRefused

__all__ = ["Saving"]


class Ending(NamedTuple):
    """Why the job is to end once its state is saved."""

    reason: str
    exit_code: int


@dataclass
class _Unfinished:
    """A version some of whose parts are there."""

    generation: int
    writers: frozenset[int]
    parts: dict[int, PartSaved] = field(default_factory=dict[int, PartSaved])


class Saving:
    """Of one job; `place` is None where nothing is saved."""

    def __init__(self, core: Core, place: SavePlace | None) -> None:
        self._core = core
        self._place = place
        self.versions: list[SavedVersion] = list(place.versions) if place is not None else []
        """Complete, newest first."""
        self._unfinished: dict[str, _Unfinished] = {}
        self._completing: dict[str, Manifest] = {}
        self._failed: set[str] = set()
        self._refused: set[str] = set()
        """Complete by their marker, but somebody found their bytes damaged."""
        self._cause = ""
        """Why the last version was not saved; '' where it was."""
        self._num_unsaid = 0
        """Versions after it that were not saved for the same reason, and nobody was told yet."""
        self.ending: Ending | None = None
        self._order: Save | None = None

    @property
    def at(self) -> SaveAt | None:
        """Where executors write."""
        if self._place is None:
            return None
        return SaveAt(directory=self._place.directory, run=self._place.run)

    # --- the beginning

    def start(self) -> None:
        """Choose what the job begins with; it is stopped where it cannot begin so."""
        core = self._core
        if not core.job.checkpoint.resume:
            return
        if not self.versions:
            troubles = self._place.troubles if self._place is not None else ()
            why = "; ".join(troubles) or "there is none"
            core.stop(f"no complete version to resume from: {why}", UserError.exit_code)
            return
        chosen = self.versions[0]
        other = position_difference(chosen.position, self._position())
        if other:
            core.stop(
                f"version {chosen.name} cannot be resumed by this job: {other}",
                UserError.exit_code,
            )
            return
        self.go_back(chosen)

    def go_back(self, version: SavedVersion) -> None:
        """All begin again from `version`, as if it were how the job began."""
        core = self._core
        lost_steps = len(core.records) - version.step
        start = Commit(
            version=version.step, updates=version.updates, record=None, saved=version.name
        )
        core.go_back(start)
        redone = f", {lost_steps} steps are done again" if lost_steps > 0 else ""
        core.log("goes_back", version=version.name, step=version.step, redone=max(lost_steps, 0))
        core.say(f"from step {version.step} of saved version {version.name}{redone}")

    def refused(self, rank: int, message: VersionRefused) -> None:
        """`rank` could not load a version: nobody loads it any more, or the job has no use for it.

        In the latter case it is stopped.
        """
        core, name, why = self._core, message.name, message.why
        core.log("version_refused", rank=rank, version=name, why=why)
        if message.is_other_model:
            core.stop(why, UserError.exit_code)
            return
        self._refused.add(name)
        if any(each.name == name for each in self.versions):
            self.versions = [each for each in self.versions if each.name != name]
            core.say(f"saved version refused: {why}")

    def remember(self, refused: Collection[str]) -> None:
        """Versions that were refused under another coordinator."""
        self._refused.update(refused)
        self.versions = [each for each in self.versions if each.name not in self._refused]

    def _position(self) -> Position:
        ready = next(iter(self._core.ready.values()))
        return position_of(self._core.job, ready.dataset_digest)

    # --- parts

    def part_saved(self, rank: int, message: PartSaved) -> None:
        """One more part is on disk."""
        core, name = self._core, message.name
        if message.generation != core.generation or name in self._failed or self._place is None:
            return  # its generation is over
        if name in self._completing or any(each.name == name for each in self.versions):
            return  # said again
        unfinished = self._unfinished.setdefault(
            name, _Unfinished(core.generation, self._writers())
        )
        unfinished.parts[rank] = message
        if unfinished.parts.keys() < unfinished.writers:
            return
        del self._unfinished[name]
        manifest = self._manifest(unfinished)
        self._completing[name] = manifest
        core.log(
            "parts_saved",
            version=name,
            step=message.version,
            bytes=manifest.data_bytes,
            took_s=max(part.took_s for part in unfinished.parts.values()),
            stalled_s=max(part.stalled_s for part in unfinished.parts.values()),
        )
        core.do(CompleteVersion(name, manifest, self._spared()))

    def _spared(self) -> tuple[str, ...]:
        """Versions that were refused, and the one that all begin with now."""
        core = self._core
        reads = {core.start.saved} if core.base == 0 and core.start.saved else set[str]()
        return tuple(sorted(self._refused | reads))

    def _writers(self) -> frozenset[int]:
        core = self._core
        if core.phase is Phase.SAVING:
            assert core.base_plan is not None
            return frozenset(core.base_plan.plan.active_ranks) & core.alive
        assert core.plan is not None
        return frozenset(core.plan.plan.active_ranks)

    def _manifest(self, unfinished: _Unfinished) -> Manifest:
        assert self._place is not None
        first = next(iter(unfinished.parts.values()))
        return Manifest(
            step=first.version,
            updates=first.updates,
            loss=next((p.loss for p in unfinished.parts.values() if p.loss is not None), None),
            position=self._position(),
            run=self._place.run,
            generation=unfinished.generation,
            parts=tuple(
                PartFile(
                    rank=rank,
                    part_bytes=part.part_bytes,
                    part_sha256=part.part_sha256,
                    data_bytes=part.data_bytes,
                )
                for rank, part in sorted(unfinished.parts.items())
            ),
        )

    def part_failed(self, rank: int, message: SaveFailed) -> None:
        """A rank could not write its part: the version before it stays the newest one."""
        if message.generation != self._core.generation or message.name in self._failed:
            return
        self._fail(message.name, f"rank {rank}: {message.why}", cause=message.why)

    def _fail(self, name: str, why: str, cause: str) -> None:
        core = self._core
        self._failed.add(name)
        self._unfinished.pop(name, None)
        core.log("not_saved", version=name, why=why)
        cause = re.sub(r"part-\d+", "", cause.replace(name, ""))  # whichever rank said it
        if cause == self._cause:
            self._num_unsaid += 1
        else:
            self._tell_unsaid()
            self._cause = cause
            core.say(f"version {name} was not saved: {why}; {self.newest()}")
        core.do(DropVersion(name))
        if self._is_last(name):
            self._end(why)

    def _tell_unsaid(self) -> None:
        num, self._num_unsaid = self._num_unsaid, 0
        if num:
            were = "versions were" if num > 1 else "version was"
            self._core.say(f"{num} more {were} not saved for the same reason")

    def completed(self, name: str, trouble: str, pruned: Sequence[str]) -> None:
        """The disk did what `CompleteVersion` asked for; or `trouble` says why not."""
        core, manifest = self._core, self._completing.pop(name)
        if trouble:
            self._fail(name, trouble, cause=trouble)
            return
        version = saved_version(name, manifest)
        self._tell_unsaid()
        self._cause = ""
        kept = [each for each in (version, *self.versions) if each.name not in pruned]
        self.versions = sorted(kept, reverse=True, key=lambda each: each.step)
        core.log("saved", version=name, step=manifest.step, pruned=pruned)
        if self._is_last(name):
            self._end("")

    def check(self) -> None:
        """Drop what a generation that is over left unfinished; at the end tell what was not."""
        core = self._core
        if core.phase is Phase.STOPPING:
            self._tell_unsaid()
        for name, unfinished in list(self._unfinished.items()):
            if unfinished.generation < core.generation:
                del self._unfinished[name]
                core.log("not_saved", version=name, why="its generation was closed")
                core.do(DropVersion(name))

    def completes(self, step: int) -> bool:
        """Whether a version of `step` or a later one only lacks its marker."""
        return any(manifest.step >= step for manifest in self._completing.values())

    def newest(self) -> str:
        """The newest complete version, in words."""
        if not self.versions:
            return "no version is saved"
        return f"newest saved: {self.versions[0].name} (step {self.versions[0].step})"

    # --- the end

    def end(self, reason: str, exit_code: int) -> bool:
        """The job is to end: whether there is state to be saved first, by `begin` once all settled.

        Otherwise it is stopped now. Where another coordinator led before, that shows only when all
        have settled.
        """
        self.ending = self.ending or Ending(reason, exit_code)
        is_known = self._core.perhaps_base is None or self._place is None
        missing = self._missing() if is_known else ""
        if missing:
            self._end(missing)
        return not missing

    def _missing(self) -> str:
        """Why there is nothing to save, or no whole state of it; '' where it can be saved."""
        core = self._core
        if self._place is None:
            return "nothing is saved by this job"
        if core.base_plan is None or core.base == 0:
            return "no generation ran"
        plan = core.base_plan.plan
        lost = frozenset(plan.active_ranks) - core.alive
        for part, _ in State(plan, lost).lost_parts():
            return f"no live rank holds all of layers {part.layers}"
        return ""

    def begin(self, commit: Commit) -> None:
        """All settled on `commit`: they write it, unless it is on disk already."""
        core = self._core
        missing = self._missing()
        is_saved = any(each.step == commit.version for each in self.versions)
        if missing or is_saved or commit.version == self._core.start.version:
            self._end(missing)
            return
        assert core.base_plan is not None
        core.enter(Phase.SAVING)
        writers = sorted(self._writers())
        at = self.at
        assert at is not None
        order = Save(
            generation=core.generation,
            base=core.base,
            commit=commit,
            plan=core.base_plan.text,
            alive=tuple(writers),
            at=at,
        )
        self._order = order
        self._unfinished[_named(order)] = _Unfinished(core.generation, frozenset(writers))
        for rank in writers:
            core.send(rank, order)

    def _is_last(self, name: str) -> bool:
        """Whether it is what the job waits for before it ends, and none that was begun before."""
        order = self._order
        return self._core.phase is Phase.SAVING and order is not None and name == _named(order)

    def repeat(self, rank: int) -> None:
        """What `rank` was told to write, again, unless its part is there."""
        order = self._order
        if order is None or rank not in order.alive:
            return
        unfinished = self._unfinished.get(_named(order))
        if unfinished is not None and rank not in unfinished.parts:
            self._core.send(rank, order)

    def tick(self, waited_s: float) -> None:
        """Of the phase in which survivors write."""
        if waited_s > self._core.timing.save_s:
            self._end(f"the disk took more than {waited_s:.0f} s")

    def _end(self, trouble: str) -> None:
        assert self.ending is not None
        reason, exit_code = self.ending
        if self._place is not None:
            step = len(self._core.records)
            lost = f"; step {step} is not saved: {trouble}" if trouble else ""
            reason = f"{reason}{lost}; {self.newest()}"
        self._core.stop(reason, exit_code)


def _named(order: Save) -> str:
    """The version that is written on `order`."""
    return version_name(order.commit.version, order.at.run, order.generation)
