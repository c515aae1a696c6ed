"""A generation that runs: its steps, its observed times, its end."""

from __future__ import annotations

from resihp.monitor.actions import Seen, StepCommitted, StepsTakenBack
from resihp.monitor.coordination.core import Core
from resihp.monitor.coordination.membership import Membership
from resihp.monitor.coordination.phase import Phase
from resihp.monitor.coordination.rejoining import Rejoining
from resihp.monitor.observed_sizes import ObservedSizes, Programs, Verdict
from resihp.monitor.planner import VerifiedPlan
from resihp.monitor.progress import Progress
from resihp.wire.messages import Audited, Finished, Observed, StepRecord

__all__ = ["Running"]


class Running:
    """Keeps the records of committed steps."""

    def __init__(
        self, core: Core, membership: Membership, rejoining: Rejoining, progress: Progress
    ) -> None:
        self._core = core
        self._rejoining = rejoining
        self._membership = membership
        self._progress = progress
        self._observed = ObservedSizes()
        self._programs: tuple[int, Programs] = -1, Programs(-1, {}, {})
        self._early: dict[int, tuple[StepRecord, int]] = {}
        """Reports of steps, with their generation, that came before those of earlier steps."""
        self._audited = -1
        """The newest version whose replicas were compared."""
        self.num_plans = 0
        """Generations that ran."""

    def expect(self, plan: VerifiedPlan) -> Programs:
        """What the ranks will run."""
        programs = Programs.of_plan(plan)
        self._observed.begin(self._core.generation, programs)
        self._programs = self._core.generation, programs
        return programs

    def begin(self, *, is_new: bool = True) -> None:
        """Everybody joined; a generation that is not new ran under another coordinator."""
        core = self._core
        self.num_plans += is_new
        core.enter(Phase.RUNNING)
        core.last_step_s = core.now_s
        self._progress.moved(core.now_s)

    def committed(self, record: StepRecord, generation: int) -> None:
        """A step that some rank committed counts, also if its generation is closed."""
        if record.step > len(self._core.records):
            # What was said of the steps between is on its way again, since a connection broke.
            self._early[record.step] = record, generation
            self._progress.moved(self._core.now_s)
            return
        self._count(record, generation)
        while len(self._core.records) in self._early:
            self._count(*self._early.pop(len(self._core.records)))

    def catch_up(self) -> None:
        """Count all steps that were reported, also where those before them never were."""
        for step in sorted(self._early):
            self._count(*self._early[step])
        self._early.clear()

    def _count(self, record: StepRecord, generation: int) -> None:
        core = self._core
        if not core.is_history(record.step, generation):
            return  # told late: it is done again
        if not core.keep_record(record):
            return
        self._membership.progressed()
        core.longest_step_s = max(core.longest_step_s, record.duration_s)
        core.last_step_s = core.now_s
        self._progress.moved(core.now_s)
        core.do(StepCommitted(record, generation))
        self._rejoining.committed()
        if generation == core.generation and core.phase is Phase.RUNNING:
            self._end_waiting(record.step)

    def _end_waiting(self, step: int) -> None:
        """A partition that waited for the end of the iteration that was redone comes now.

        Later only where the coordinator that was to ask for it is gone.
        """
        core = self._core
        plan = core.plan
        if plan is None or not plan.waits_for_boundary or core.round.asked_to_yield is not None:
            return
        resume = plan.plan.resume
        if resume is None or step < resume.step:
            return
        core.log("repartition", step=step)
        core.ask_to_yield()

    def taken_back(self, version: int) -> None:
        """All go on from `version`, which is before the newest committed step."""
        core = self._core
        self._early.clear()
        first, last = version, len(core.records) - 1
        if first > last:
            return
        del core.records[version:]
        core.log("taken_back", version=version, steps=list(range(first, last + 1)))
        core.say(
            f"steps {first}..{last} are done again: snapshots of lost ranks end with "
            f"version {version}"
        )
        core.do(StepsTakenBack(version))

    def observed(self, rank: int, message: Observed) -> None:
        """Times of the instructions of `rank`."""
        match self._observed.judge(rank, message):
            case Verdict.FITS:
                self._core.do(Seen(rank, message))
                generation, programs = self._programs
                if message.generation == generation:
                    times = message.starts_ns, message.ends_ns
                    program = programs.of(message.step)[rank]
                    self._core.chunk_times.add(program, message.step, *times)
            case Verdict.WRONG:
                self._core.log(
                    "times_refused",
                    rank=rank,
                    generation=message.generation,
                    starts_bytes=len(message.starts_ns),
                    ends_bytes=len(message.ends_ns),
                )
            case Verdict.LATE:
                pass  # of a generation that is long over

    def audited(self, message: Audited) -> None:
        """All replicas were compared; where they differ nobody knows which is right."""
        core = self._core
        if message.generation != core.generation or self._audited == message.version:
            return  # every member says the same
        self._audited = message.version
        differing = list(message.differing)
        core.log("audit", version=message.version, equal=not differing, differing=differing)
        if differing:
            core.stop(f"replicas differ at version {message.version}: {differing[0]}", 1)

    def finished(self, rank: int, message: Finished) -> None:
        """`rank` completed the last step of the job."""
        core = self._core
        if message.generation != core.generation:
            return
        core.round.finished.add(rank)
        assert core.plan is not None
        if core.round.finished >= set(core.plan.plan.active_ranks):
            self.catch_up()
            core.stop("finished", 0)
