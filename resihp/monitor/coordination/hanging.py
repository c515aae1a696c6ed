"""A job that stands still: whoever holds all others up is fenced, or the job ends and says why."""

from __future__ import annotations

import msgspec

from resihp.ir.model import Plan
from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.membership import Membership
from resihp.monitor.hangs import suspect
from resihp.monitor.progress import Progress
from resihp.monitor.where import hang_report
from resihp.wire.messages import AskWhere, At

__all__ = ["Hanging"]


class Hanging:
    """Of a generation that runs.

    When nothing has moved for half of the bound, all ranks are asked where they are. At the bound
    the answers are judged: one clear suspect is fenced. Where nothing is clear, the job ends when
    it has stood still for as long as a job may.
    """

    def __init__(self, core: Core, membership: Membership, progress: Progress) -> None:
        self._core = core
        self._membership = membership
        self._progress = progress
        self._answered_s: dict[int, float] = {}
        self._num_judged = -1
        """Answers that were there when they were last judged."""

    def at(self, rank: int, message: At) -> None:
        """Where `rank` is."""
        if message.generation == self._core.generation:
            self._progress.at[rank] = message
            self._answered_s[rank] = self._core.now_s

    def tick(self) -> None:
        """Ask, judge, or end the job."""
        core = self._core
        stall_s = max(core.timing.stalled_s, 3 * core.longest_step_s)
        bound_s = min(core.timing.hang_bound_s(core.chunk_times.longest_s), stall_s)
        if self._progress.is_time_to_ask(bound_s / 2, core.now_s):
            self._answered_s.clear()
            self._num_judged = -1
            core.broadcast(AskWhere())
        still_s = self._progress.still_s(core.now_s)
        if still_s > bound_s and len(self._answered_s) > self._num_judged:
            self._num_judged = len(self._answered_s)
            self._judge(bound_s / 2)
        if still_s > stall_s + (core.timing.silent_s if core.round.fenced else 0.0):
            core.stop(f"no instruction finished for {stall_s:.0f} s ({self._report()})", 1)

    def _judge(self, least_s: float) -> None:
        core, now_s = self._core, self._core.now_s
        at = {
            rank: msgspec.structs.replace(at, since_s=at.since_s + now_s - self._answered_s[rank])
            for rank, at in self._progress.at.items()
            if rank in self._answered_s
        }
        plan, comparable = self._comparable(at)
        if comparable.keys() != at.keys():
            return
        found = suspect(plan, at, core.alive - at.keys(), least_s)
        if found is not None:
            core.log("hang", ranks=[found.rank], verdict=[found.reason])
            core.book.hit(found.rank, self._progress.moved_s)
            self._membership.fence(found.rank, found.reason)

    def _comparable(self, at: dict[int, At]) -> tuple[Plan, dict[int, At]]:
        """What the ranks that are farthest run, and who runs it.

        A step that is redone has a plan of its own, so places in that and in the next step cannot
        be compared.
        """
        running = self._core.plan
        assert running is not None
        plan = running.at(max((each.step for each in at.values() if each.runs), default=-1))
        same = {
            rank: each
            for rank, each in at.items()
            if not each.runs or running.at(each.step) is plan
        }
        return plan.plan, same

    def _report(self) -> str:
        """Who holds all others up, as far as ranks answer; else what their beats said last."""
        core = self._core
        at = {rank: at for rank, at in self._progress.at.items() if rank in core.alive}
        if not at or core.plan is None:
            return self._progress.last_beats(core.alive)
        silent = dict.fromkeys(sorted(core.alive - at.keys()), "does not answer")
        plan, comparable = self._comparable(at)
        for rank in at.keys() - comparable.keys():
            silent[rank] = f"is in step {at[rank].step}, which another plan redoes"
        told = hang_report(plan, comparable, silent)
        core.log("hang", ranks=told.ranks, verdict=told.verdict)
        return "; ".join(told.verdict or told.ranks)
