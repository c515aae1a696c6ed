"""Everything that the doctor looks at, in one report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from resihp.config import JobConfig, JobSection
from resihp.monitor.doctor.clocks import check_clock
from resihp.monitor.doctor.finding import Finding
from resihp.monitor.doctor.leftovers import check_leftovers
from resihp.monitor.doctor.network import check_listeners, check_network
from resihp.monitor.doctor.timeouts import Timeout, check_order, timeouts

__all__ = ["Report", "as_json", "as_text", "examine"]

DETECT_WITHIN_S = JobSection(steps=1).detect_within_s
"""For who names no job file."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `resihp doctor` says."""

    detect_within_s: float
    timeouts: tuple[Timeout, ...]
    findings: tuple[Finding, ...]

    @property
    def num_problems(self) -> int:
        """How many findings ask for something to be done."""
        return sum(finding.level == "problem" for finding in self.findings)


def examine(job: JobConfig | None, runs_dir: Path, *, clean: bool) -> Report:
    """Look at this machine, and at `job` on it; `clean` removes what killed jobs left."""
    detect_within_s = DETECT_WITHIN_S if job is None else job.job.detect_within_s
    return Report(
        detect_within_s=detect_within_s,
        timeouts=tuple(timeouts(detect_within_s)),
        findings=tuple(_findings(job, runs_dir, detect_within_s, clean=clean)),
    )


def _findings(
    job: JobConfig | None, runs_dir: Path, detect_within_s: float, *, clean: bool
) -> Iterator[Finding]:
    yield from check_order(detect_within_s)
    yield from check_clock()
    yield from check_network(job)
    yield from check_listeners(job)
    yield from check_leftovers(runs_dir, clean=clean)
    if job is not None:
        from resihp.monitor.doctor.room import check_room  # prices of the compiler

        yield from check_room(job)


def as_json(report: Report) -> str:
    """For programs: version 1 of the format."""
    document = {
        "version": 1,
        "ok": report.num_problems == 0,
        "detect_within_s": report.detect_within_s,
        "timeouts": report.timeouts,
        "findings": report.findings,
    }
    return msgspec.json.format(msgspec.json.encode(document)).decode()


def as_text(report: Report) -> str:
    """For people: the table of timeouts, then what was found, problems last."""
    lines = [f"timeouts, from detect_within_s = {report.detect_within_s:g}:"]
    lines += (f"  {row.name:<13}{row.seconds:>8g} s  {row.meaning}" for row in report.timeouts)
    lines.append("")
    order = {"ok": 0, "note": 1, "problem": 2}
    for finding in sorted(report.findings, key=lambda each: order[each.level]):
        lines.append(f"{finding.level:<8} {finding.topic:<10} {finding.text}")
    lines.append("")
    num = report.num_problems
    lines.append("all is well" if num == 0 else f"{num} problem{'s' if num > 1 else ''}")
    return "\n".join(lines)
