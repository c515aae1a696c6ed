"""The coordinator: who is alive, which generation runs which plan, and when to go on.

Pure protocol logic: messages and ticks in, actions out; no socket, no clock of its own.

    STARTING --all ready--> OPENING --all joined--> RUNNING --all finished--> STOPPING
                               ^                       |
                               |                   rank lost (in any phase)
                               +----- SETTLING <-------+

A loss closes the generation: survivors stop work at once, settle on one version of the state,
get a new verified plan, rebuild their groups, move shards, and run again (DESIGN §5, §6).
"""

from __future__ import annotations

import enum

import msgspec

from resihp.config import JobConfig
from resihp.errors import NoFeasiblePlan, PlanRejected, UserError
from resihp.ir.expand import expand
from resihp.ir.program_bytes import encode_program
from resihp.monitor.actions import (
    Action,
    End,
    Evict,
    Log,
    PlanMade,
    Say,
    Seen,
    Send,
    StepCommitted,
)
from resihp.monitor.incident import Incident, IncidentBook, listed
from resihp.monitor.last_words import how_it_ended, users_mistake
from resihp.monitor.layout_line import layout_line
from resihp.monitor.observed_sizes import ObservedSizes, Verdict
from resihp.monitor.planner import Planner, VerifiedPlan
from resihp.monitor.progress import Progress
from resihp.monitor.settlement import differing_shards, newest_version
from resihp.monitor.where import hang_report
from resihp.wire.auth import derive_key
from resihp.wire.messages import (
    AskWhere,
    At,
    Beat,
    Close,
    Commit,
    Deploy,
    ExecutorExited,
    ExecutorStarted,
    Fault,
    Fence,
    Finished,
    Go,
    Joined,
    Message,
    Observed,
    Positions,
    Ready,
    Settled,
    StepDone,
    StepRecord,
    Stop,
    StoreAt,
    StoreOpened,
    Trouble,
)
from resihp.wire.timing import Timing

__all__ = ["Coordinator", "Phase"]

MAX_REOPENINGS = 3
"""How often in a row a generation may fail to open without any rank being lost."""


class Phase(enum.Enum):
    """Where the job stands."""

    STARTING = "starting"
    SETTLING = "settling"
    OPENING = "opening"
    RUNNING = "running"
    STOPPING = "stopping"


class Coordinator:
    """One job. Call `receive`, `disconnected` and `tick`; carry out what they return."""

    def __init__(self, job: JobConfig, planner: Planner, secret: bytes, now_s: float) -> None:
        self._job = job
        self._planner = planner
        self._secret = secret
        self._timing = Timing.from_detect_within(job.job.detect_within_s)
        self._actions: list[Action] = []
        self._now_s = now_s
        self._phase_since_s = now_s
        self.phase = Phase.STARTING

        self._alive: set[int] = set(range(job.parallel.world))
        self._lost: list[int] = []
        self._ready: dict[int, Ready] = {}
        self._heard_s: dict[int, float] = {}
        self._progress = Progress(now_s)

        self.generation = 0
        self._base = 0
        """The generation whose layout all survivors hold; 0: parameters as initialised."""
        self._base_plan: VerifiedPlan | None = None
        self._plan: VerifiedPlan | None = None
        self._settled: dict[int, Settled] = {}
        self._joined: dict[int, Joined] = {}
        self._fenced: set[int] = set()
        self._evicted: set[int] = set()
        self._finished: set[int] = set()
        self._reopenings = 0
        self._trouble_since_s: float | None = None
        self._observed = ObservedSizes()

        self.records: list[StepRecord] = []
        self._book = IncidentBook()
        self.num_plans = 0
        self._last_step_s = now_s
        self._longest_step_s = 0.0

    # --- inputs

    def receive(self, rank: int, message: Message, now_s: float) -> list[Action]:
        """A message of `rank`."""
        self._now_s = now_s
        self._heard_s[rank] = now_s
        if rank in self._alive and self.phase is not Phase.STOPPING:
            self._dispatch(rank, message)
        return self._take()

    def disconnected(self, rank: int, now_s: float) -> list[Action]:
        """The supervisor of `rank` is gone, and with it (by the kernel) its executor."""
        self._now_s = now_s
        if rank not in self._alive or self.phase is Phase.STOPPING:
            pass
        elif self.phase is Phase.STARTING:
            self._alive.discard(rank)
            self._stop(f"the supervisor of rank {rank} was gone before the start", 1)
        else:
            self._lose(rank, "its supervisor is gone", "")
        return self._take()

    def hit(self, rank: int, at_s: float) -> None:
        """Somebody is about to kill `rank` (for the detection time of the incident)."""
        self._book.hit(rank, at_s)

    def stop(self, reason: str, exit_code: int, now_s: float) -> list[Action]:
        """End the job from outside (a signal)."""
        self._now_s = now_s
        if self.phase is not Phase.STOPPING:
            self._stop(reason, exit_code)
        return self._take()

    def tick(self, now_s: float) -> list[Action]:
        """Time passes: act on whatever took too long."""
        self._now_s = now_s
        if self._progress.is_paused(self._alive, now_s):
            self._phase_since_s = now_s
            self._progress.moved(now_s)
        waited_s = now_s - self._phase_since_s
        match self.phase:
            case Phase.STARTING if waited_s > self._timing.start_s:
                missing = sorted(self._alive - self._ready.keys())
                self._stop(f"ranks {_ranks(missing)} did not get ready in {waited_s:.0f} s", 1)
            case Phase.SETTLING if waited_s > 2 * self._settle_bound_s:
                stuck = sorted(self._alive - self._settled.keys())
                self._stop(f"{listed(stuck)} neither settled nor died in {waited_s:.0f} s", 1)
            case Phase.SETTLING if waited_s > self._settle_bound_s:
                for rank in sorted(self._alive - self._settled.keys()):
                    self._fence(rank, f"did not leave its generation in {waited_s:.1f} s")
            case Phase.OPENING if waited_s > self._timing.join_s:
                self._reopen(f"not all ranks joined in {waited_s:.0f} s")
            case Phase.OPENING | Phase.RUNNING if self._in_trouble():
                self._reopen("a connection broke, and nobody was lost")
            case Phase.RUNNING:
                self._check_stall()
            case _:
                pass
        if self.phase is not Phase.STOPPING:
            self._check_silence()
        return self._take()

    def _in_trouble(self) -> bool:
        """Whether something broke so long ago that a lost rank would have been found by now."""
        since_s = self._trouble_since_s
        return since_s is not None and self._now_s - since_s > self._timing.silent_s

    @property
    def incidents(self) -> list[Incident]:
        """What happened so far, in order."""
        return self._book.incidents

    @property
    def alive(self) -> frozenset[int]:
        """Ranks whose executor runs."""
        return frozenset(self._alive)

    def positions(self, at: dict[int, At], now_s: float) -> Positions:
        """Where the ranks are: what some answered, and what is known of all."""
        return Positions(
            generation=self.generation,
            phase=self.phase.value,
            alive=tuple(sorted(self._alive)),
            at=at,
            heard_s={rank: now_s - heard_s for rank, heard_s in self._heard_s.items()},
            beats=self._progress.beats,
        )

    # --- messages

    def _dispatch(self, rank: int, message: Message) -> None:
        match message:
            case Ready():
                self._on_ready(rank, message)
            case ExecutorStarted():
                self._log("executor_started", rank=rank, pid=message.pid)
            case ExecutorExited():
                self._on_exit(rank, message)
            case Beat():
                self._on_beat(rank, message)
            case Fault():
                self._on_fault(rank, message)
            case Trouble():
                self._on_trouble(rank, message)
            case Settled() if message.generation == self.generation:
                self._on_settled(rank, message)
            case StoreOpened() if self._opens(message.generation):
                self._broadcast(StoreAt(generation=message.generation, port=message.port))
            case Joined() if self._opens(message.generation):
                self._on_joined(rank, message)
            case StepDone():  # a committed step counts, also if its generation is closed
                self._on_record(message.record, message.generation)
            case Observed():  # so do its times
                self._on_observed(rank, message)
            case At() if message.generation == self.generation:
                self._progress.at[rank] = message
            case Finished() if message.generation == self.generation:
                self._on_finished(rank)
            case _:
                pass  # of a generation that is over

    def _opens(self, generation: int) -> bool:
        return self.phase is Phase.OPENING and generation == self.generation

    @property
    def _settle_bound_s(self) -> float:
        return self._timing.settle_bound_s(self._longest_step_s if self.records else None)

    def _on_beat(self, rank: int, message: Beat) -> None:
        declared = self._progress.beat(rank, message, self._now_s)
        if declared is not None:
            reason, at_most_s = declared.reason, declared.at_most_s
            self._log("pause", rank=rank, reason=reason, at_most_s=at_most_s)

    def _on_ready(self, rank: int, message: Ready) -> None:
        self._ready[rank] = message
        digests = {ready.dataset_digest for ready in self._ready.values()}
        if len(digests) > 1:
            self._stop("the ranks read different data: their dataset digests differ", 1)
        elif self.phase is Phase.STARTING and self._ready.keys() == self._alive:
            self._log(
                "ready",
                dataset=message.dataset_digest,
                samples=message.num_samples,
                skipped_files=message.num_skipped_files,
            )
            self._plan_and_deploy("start", version=0, record=None, updates=0)

    def _on_fault(self, rank: int, message: Fault) -> None:
        self.hit(rank, message.at_s)
        self._log(
            "fault",
            rank=rank,
            fault=message.kind,
            step=message.step,
            instruction=message.instruction,
        )

    def _on_trouble(self, rank: int, message: Trouble) -> None:
        self._log("trouble", rank=rank, generation=message.generation, what=message.what)
        if message.generation == self.generation and self._trouble_since_s is None:
            self._trouble_since_s = self._now_s

    def _on_exit(self, rank: int, message: ExecutorExited) -> None:
        how, mistake = how_it_ended(message), users_mistake(message)
        if mistake is not None:
            self._log("refused", rank=rank, why=mistake)
            self._stop(mistake, UserError.exit_code)
        elif self.phase is Phase.STARTING:
            self._alive.discard(rank)
            self._stop(f"rank {rank} ended before the start ({how})\n{message.last_words}", 1)
        else:
            self._lose(rank, f"its executor ended with {how}", message.last_words)

    # --- losing a rank

    def _lose(self, rank: int, evidence: str, last_words: str) -> None:
        self._alive.discard(rank)
        self._lost.append(rank)
        self._log("rank_lost", rank=rank, evidence=evidence, last_words=last_words)
        self._reopenings = 0
        if last_words.strip():
            self._say(f"rank {rank}: {last_words.strip().splitlines()[-1]}")
        self._book.lose(
            rank,
            evidence,
            now_s=self._now_s,
            step=len(self.records),
            since_s=self._last_step_s if self.phase is Phase.RUNNING else self._now_s,
        )
        self._close()

    def _close(self) -> None:
        """Everybody leaves the running generation."""
        self.generation += 1
        self._settled.clear()
        self._joined.clear()
        self._fenced.clear()
        self._finished.clear()
        self._trouble_since_s = None
        if not self._alive:
            self._stop("no rank is left", NoFeasiblePlan.exit_code)
            return
        self._enter(Phase.SETTLING)
        self._broadcast(Close(generation=self.generation))

    def _fence(self, rank: int, reason: str) -> None:
        if rank not in self._fenced:
            self._fenced.add(rank)
            self._log("fence", rank=rank, reason=reason)
            self._send(rank, Fence(reason=reason))

    def _reopen(self, reason: str) -> None:
        self._reopenings += 1
        self._log("reopen", reason=reason, attempt=self._reopenings)
        if self._reopenings > MAX_REOPENINGS:
            self._stop(f"{reason}, {self._reopenings} times in a row", 1)
        else:
            self._close()

    # --- opening a generation

    def _on_settled(self, rank: int, message: Settled) -> None:
        if self.phase is not Phase.SETTLING:
            return
        if self._base not in message.layouts:
            self._fence(rank, f"holds layouts {message.layouts}, not {self._base}")
            return
        self._settled[rank] = message
        if self._settled.keys() != self._alive:
            return
        settlement = newest_version(
            self._settled.values(), self.records[-1] if self.records else None
        )
        if settlement.record is not None:
            self._on_record(settlement.record, self._base)
        cause = "reopened"
        incident = self._book.open
        if incident is not None:
            incident.settled_s = self._now_s
            incident.noticed_s = max(message.noticed_s for message in self._settled.values())
            incident.step = settlement.version
            cause = f"lost {listed(incident.ranks)}: {incident.evidence}"
        self._plan_and_deploy(
            cause, settlement.version, settlement.record, updates=settlement.updates
        )

    def _plan_and_deploy(
        self, cause: str, version: int, record: StepRecord | None, updates: int
    ) -> None:
        try:
            plan = self._make_plan(version)
        except NoFeasiblePlan as error:
            self._stop(self._no_plan(str(error)), NoFeasiblePlan.exit_code)
            return
        except PlanRejected as error:
            self._log("plan_rejected", findings=[d.code for d in error.diagnostics])
            self._stop(str(error), PlanRejected.exit_code)
            return
        if self.generation == 0:
            self.generation = 1
        self._plan = plan
        self._actions.append(PlanMade(self.generation, plan.text, cause))
        if plan.decision is not None:
            self._log("decision", generation=self.generation, **plan.decision)
        self._deploy(plan, version, record, updates)

    def _make_plan(self, version: int) -> VerifiedPlan:
        previous = self._base_plan or self._planner.initial()
        if not self._lost:
            return previous
        return self._planner.after_loss(previous, self._lost, version)

    def _no_plan(self, why: str) -> str:
        return (
            f"no plan can carry the loss of {listed(sorted(self._lost))}: {why}; "
            f"newest complete state: {self._newest_state()}"
        )

    def _newest_state(self) -> str:
        if self._base_plan is None:
            return "none, the job had not begun"
        return f"step {len(self.records)}, never saved (this version writes no checkpoint)"

    def _deploy(
        self, plan: VerifiedPlan, version: int, record: StepRecord | None, updates: int
    ) -> None:
        self._enter(Phase.OPENING)
        programs = {rank: expand(plan.plan, rank) for rank in plan.plan.active_ranks}
        self._observed.begin(self.generation, programs)
        shared = Deploy(
            generation=self.generation,
            plan=plan.text,
            previous_plan=self._base_plan.text if self._base_plan is not None else None,
            base=self._base,
            commit=Commit(version=version, updates=updates, record=record),
            # Standby ranks too: they may have shards to give away.
            peers={rank: self._ready[rank].port for rank in sorted(self._alive)},
            key=derive_key(self._secret, f"generation {self.generation}"),
            store_rank=min(plan.plan.active_ranks),
            emulated=plan.emulated,
        )
        for rank in sorted(self._alive):
            program = encode_program(programs[rank]) if rank in programs else b""
            self._send(rank, msgspec.structs.replace(shared, program=program))

    def _on_joined(self, rank: int, message: Joined) -> None:
        self._joined[rank] = message
        if self._joined.keys() != self._alive:
            return
        differing = differing_shards(self._joined)
        if differing:
            self._stop(f"replicas of the same shard differ after recovery: {differing}", 1)
            return
        self._base, self._base_plan = self.generation, self._plan
        self.num_plans += 1
        self._enter(Phase.RUNNING)
        self._last_step_s = self._now_s
        self._progress.moved(self._now_s)
        self._broadcast(Go(generation=self.generation))
        hashes = {name: h for joined in self._joined.values() for name, h in joined.hashes.items()}
        self._log("running", generation=self.generation, hashes=hashes)
        if self._book.open is not None:
            self._close_incident(self._book.open)

    def _close_incident(self, incident: Incident) -> None:
        assert self._plan is not None
        incident.resumed_s = self._now_s
        incident.moved_bytes = sum(joined.moved_bytes for joined in self._joined.values())
        incident.action = layout_line(self._plan.plan)
        self._actions.append(Log("incident", incident.row()))
        self._say(incident.line)

    # --- running

    def _on_record(self, record: StepRecord, generation: int) -> None:
        if record.step != len(self.records):
            assert record.step < len(self.records), "a step was skipped"
            return
        self.records.append(record)
        self._reopenings = 0
        self._longest_step_s = max(self._longest_step_s, record.duration_s)
        self._last_step_s = self._now_s
        self._progress.moved(self._now_s)
        self._actions.append(StepCommitted(record, generation))

    def _on_observed(self, rank: int, message: Observed) -> None:
        match self._observed.judge(rank, message):
            case Verdict.FITS:
                self._actions.append(Seen(rank, message))
            case Verdict.WRONG:
                self._log(
                    "times_refused",
                    rank=rank,
                    generation=message.generation,
                    starts_bytes=len(message.starts_ns),
                    ends_bytes=len(message.ends_ns),
                )
            case Verdict.LATE:
                pass  # of a generation that is long over

    def _on_finished(self, rank: int) -> None:
        self._finished.add(rank)
        assert self._plan is not None
        if self._finished >= set(self._plan.plan.active_ranks):
            self._stop("finished", 0)

    def _check_stall(self) -> None:
        bound_s = max(self._timing.stalled_s, 3 * self._longest_step_s)
        if self._progress.is_time_to_ask(bound_s / 2, self._now_s):
            self._broadcast(AskWhere())
        if self._progress.still_s(self._now_s) > bound_s:
            self._stop(f"no instruction finished for {bound_s:.0f} s ({self._hang()})", 1)

    def _hang(self) -> str:
        """Who holds all others up, as far as ranks answer; else what their beats said last."""
        at = {rank: at for rank, at in self._progress.at.items() if rank in self._alive}
        if not at or self._plan is None:
            return self._progress.last_beats(self._alive)
        silent = dict.fromkeys(sorted(self._alive - at.keys()), "does not answer")
        told = hang_report(self._plan.plan, at, silent)
        self._log("hang", ranks=told.ranks, verdict=told.verdict)
        return "; ".join(told.verdict or told.ranks)

    def _check_silence(self) -> None:
        for rank in sorted(self._alive):
            heard_s = self._heard_s.get(rank)
            if heard_s is None or rank in self._evicted:
                continue
            if self._now_s - heard_s > self._timing.silent_s:
                self._evicted.add(rank)
                self._log("evict", rank=rank, silent_s=self._now_s - heard_s)
                self._actions.append(Evict(rank))

    # --- ending

    def _stop(self, reason: str, exit_code: int) -> None:
        self._enter(Phase.STOPPING)
        for rank in range(self._job.parallel.world):  # supervisors outlive their executors
            self._send(rank, Stop(reason=reason, exit_code=exit_code))
        self._log("stop", reason=reason, exit_code=exit_code)
        self._actions.append(End(exit_code, reason))

    # --- helpers

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._phase_since_s = self._now_s

    def _send(self, rank: int, message: Message) -> None:
        self._actions.append(Send(rank, message))

    def _broadcast(self, message: Message) -> None:
        for rank in sorted(self._alive):
            self._send(rank, message)

    def _log(self, kind: str, **fields: object) -> None:
        self._actions.append(Log(kind, fields))

    def _say(self, line: str) -> None:
        self._actions.append(Say(line))

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions


def _ranks(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
