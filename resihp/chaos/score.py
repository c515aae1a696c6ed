"""What many faults did to a job: the score, and what of it must not be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from resihp.chaos.reference import Reference, Row, difference

__all__ = ["RunScore", "Score", "judged", "num_calm", "percentile", "total"]

MOST_GROWTH = {"fds": 24, "threads": 12, "rss_mib": 128.0}
"""What a process may have more late in its life than early."""


class RunScore(msgspec.Struct, frozen=True, kw_only=True):
    """One job from its start to its end."""

    number: int
    ended: str
    """How it ended."""
    exit_code: int
    num_faults: int
    num_incidents: int
    num_steps: int
    running_s: float
    """From its first instruction to its end."""
    useful_s: float
    """What its steps take without failures."""
    detection_ms: list[float]
    recovery_ms: list[float]
    lost_work_s: float
    samples_lost: int
    samples_doubled: int
    hash_mismatches: int
    num_steps_compared: int
    num_bitwise: int
    """Steps whose loss has the bits of the run without faults."""
    worst_difference: float
    """Largest relative difference of a loss."""
    worst_excess: float
    """By how much a difference passes what rounding may make; 0: none does."""
    growth: dict[str, float]
    left_behind: list[str]
    """Processes and shared memory after the end."""
    faults: dict[str, int]

    @property
    def violations(self) -> list[str]:
        """What must not be."""
        found: list[str] = []
        if self.exit_code not in (0, 4):
            found.append(f"ended with {self.exit_code}: {self.ended}")
        if self.samples_lost or self.samples_doubled:
            found.append(f"{self.samples_lost} samples lost, {self.samples_doubled} doubled")
        if self.hash_mismatches:
            found.append(f"{self.hash_mismatches} hash mismatches")
        if self.worst_excess > 0:
            found.append(f"a loss differs by {self.worst_excess:.1e} more than rounding makes")
        for what, most in MOST_GROWTH.items():
            if self.growth.get(what, 0.0) > most:
                found.append(f"{what} of a process grew by {self.growth[what]:.0f}")
        if self.left_behind:
            found.append(f"left behind: {', '.join(self.left_behind)}")
        return found


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """All jobs of one chaos."""

    seed: int
    source: str
    num_runs: int
    num_finished: int
    num_without_plan: int
    """Ended since more was lost than any plan can carry."""
    num_faults: int
    faults: dict[str, int]
    num_incidents: int
    faults_per_hour: float
    detection_p50_ms: float
    detection_p99_ms: float
    recovery_p50_ms: float
    recovery_p99_ms: float
    num_steps: int
    lost_work_s: float
    goodput: float
    samples_lost: int
    samples_doubled: int
    hash_mismatches: int
    num_bitwise: int
    num_steps_compared: int
    worst_difference: float
    growth: dict[str, float]
    violations: list[str]
    seconds: float

    @property
    def text(self) -> str:
        """The score as a table."""
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.faults.items()))
        rows = [
            ("faults", f"{self.num_faults} in {self.seconds:.0f} s ({kinds})"),
            ("faults per hour", f"{self.faults_per_hour:.0f}"),
            (
                "jobs",
                f"{self.num_runs}, {self.num_finished} finished, "
                f"{self.num_without_plan} ended for want of ranks",
            ),
            ("incidents", f"{self.num_incidents}"),
            ("detection p50, p99", _both(self.detection_p50_ms, self.detection_p99_ms)),
            ("recovery p50, p99", _both(self.recovery_p50_ms, self.recovery_p99_ms)),
            ("lost work", f"{self.lost_work_s:.1f} s in {self.num_steps} steps"),
            (
                "goodput",
                f"{100 * self.goodput:.0f} % of the time is of steps without faults",
            ),
            ("samples", f"{self.samples_lost} lost, {self.samples_doubled} doubled"),
            ("hash mismatches", f"{self.hash_mismatches}"),
            (
                "losses",
                f"{self.num_bitwise} of {self.num_steps_compared} bitwise those of the run without "
                f"faults, worst difference {self.worst_difference:.1e} relative",
            ),
            (
                "growth",
                ", ".join(f"{name} {value:.0f}" for name, value in self.growth.items())
                + " (the most of any process)",
            ),
        ]
        lines = [f"{name:<20} {value}" for name, value in rows]
        lines += [f"VIOLATION: {each}" for each in self.violations]
        return "\n".join(lines)


def _both(p50: float, p99: float) -> str:
    return "none" if math.isnan(p50) else f"{p50:.0f} ms, {p99:.0f} ms"


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that `share` of all do not pass; nan of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def judged(
    number: int,
    *,
    events: Sequence[Row],
    metrics: Sequence[Row],
    ledger: Sequence[Row],
    reference: Reference,
    exit_code: int,
    faults: Mapping[str, int],
    growth: Mapping[str, float],
    left_behind: Sequence[str],
    ended_s: float,
    ended: str = "",
) -> RunScore:
    """The score of a run from what it left behind, beside a run of the same job without faults.

    `ended_s` is when it ended, on the clock of its events.
    """
    begin_s = next((float(r["at_s"]) for r in events if r["event"] == "running"), ended_s)
    stops = [str(row["reason"]) for row in events if row["event"] == "stop"]
    incidents = [row for row in events if row["event"] == "incident"]
    losses = {int(row["step"]): row["loss"] for row in metrics}
    num_bitwise, worst, excess = _compared(losses, reference)
    lost, doubled = _samples(ledger, reference)
    return RunScore(
        number=number,
        ended=ended or (stops[-1] if stops else "no end"),
        exit_code=exit_code,
        num_faults=sum(faults.values()),
        num_incidents=len(incidents),
        num_steps=len(losses),
        running_s=ended_s - begin_s,
        useful_s=reference.usual_s * len(losses),
        detection_ms=_numbers(incidents, "detection_ms"),
        recovery_ms=_numbers(incidents, "recovery_ms"),
        lost_work_s=sum(_numbers(incidents, "lost_work_s")),
        samples_lost=lost,
        samples_doubled=doubled,
        hash_mismatches=sum("differ" in reason for reason in stops),
        num_steps_compared=sum(_is_judged(step, reference) for step in losses),
        num_bitwise=num_bitwise,
        worst_difference=worst,
        worst_excess=excess,
        growth=dict(growth),
        left_behind=list(left_behind),
        faults=dict(faults),
    )


def _numbers(rows: Iterable[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name) is not None]


def num_calm(scores: Sequence[RunScore]) -> int:
    """How many of the last jobs no fault struck, one after the other."""
    return next(
        (number for number, score in enumerate(reversed(scores)) if score.num_faults), len(scores)
    )


def _is_judged(step: int, reference: Reference) -> bool:
    """Whether the loss of `step` says anything; one beyond the job's end is wrong anyway."""
    return step >= len(reference.tolerance) or math.isfinite(reference.tolerance[step])


def _compared(losses: Mapping[int, float | None], reference: Reference) -> tuple[int, float, float]:
    """(losses with the same bits, largest difference, largest one beyond what is allowed)."""
    num_bitwise, worst, excess = 0, 0.0, 0.0
    for step, loss in losses.items():
        expected = reference.losses[step] if step < len(reference.losses) else None
        apart = difference(loss, expected)
        if not _is_judged(step, reference) and math.isfinite(apart):
            continue
        num_bitwise += apart == 0.0
        worst = max(worst, apart)
        allowed = reference.tolerance[step] if expected is not None else 0.0
        excess = max(excess, apart - allowed if math.isfinite(apart) else apart)
    return num_bitwise, worst, excess


def _samples(ledger: Sequence[Row], reference: Reference) -> tuple[int, int]:
    """(lost, doubled) samples of the committed steps, against the same steps without faults.

    The newest row of a step counts: an older one was taken back with its state.
    """
    newest = {int(row["step"]): row["samples"] for row in ledger}
    steps = max(newest, default=-1) + 1
    wanted = Counter(s for samples in reference.samples[:steps] for s in samples)
    used = Counter(s for samples in newest.values() for s in samples)
    return (wanted - used).total(), (used - wanted).total()


def total(runs: Sequence[RunScore], *, seed: int, source: str, seconds: float) -> Score:
    """The score of all runs; `seconds` is how long faults were brought about."""
    faults = Counter[str]()
    for run in runs:
        faults.update(run.faults)
    detections = [ms for run in runs for ms in run.detection_ms]
    recoveries = [ms for run in runs for ms in run.recovery_ms]
    running_s = sum(run.running_s for run in runs)
    return Score(
        seed=seed,
        source=source,
        num_runs=len(runs),
        num_finished=sum(run.exit_code == 0 for run in runs),
        num_without_plan=sum(run.exit_code == 4 for run in runs),
        num_faults=faults.total(),
        faults=dict(faults),
        num_incidents=sum(run.num_incidents for run in runs),
        faults_per_hour=3600 * faults.total() / seconds,
        detection_p50_ms=percentile(detections, 0.5),
        detection_p99_ms=percentile(detections, 0.99),
        recovery_p50_ms=percentile(recoveries, 0.5),
        recovery_p99_ms=percentile(recoveries, 0.99),
        num_steps=sum(run.num_steps for run in runs),
        lost_work_s=sum(run.lost_work_s for run in runs),
        goodput=sum(run.useful_s for run in runs) / running_s if running_s else 0.0,
        samples_lost=sum(run.samples_lost for run in runs),
        samples_doubled=sum(run.samples_doubled for run in runs),
        hash_mismatches=sum(run.hash_mismatches for run in runs),
        num_bitwise=sum(run.num_bitwise for run in runs),
        num_steps_compared=sum(run.num_steps_compared for run in runs),
        worst_difference=max((run.worst_difference for run in runs), default=0.0),
        growth={
            name: max((run.growth.get(name, 0.0) for run in runs), default=0.0)
            for name in MOST_GROWTH
        },
        violations=[f"job {run.number}: {each}" for run in runs for each in run.violations],
        seconds=seconds,
    )
