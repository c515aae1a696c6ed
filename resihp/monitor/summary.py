"""The lines at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from resihp.monitor.incident import Incident, listed
from resihp.wire.messages import StepRecord

__all__ = ["step_line", "summary"]


def step_line(record: StepRecord, generation: int) -> str:
    """One committed iteration, for the console."""
    tokens_per_s = record.num_tokens / record.duration_s
    if record.emulated:
        return (
            f"step {record.step:4d}  emulated, nothing computed  "
            f"{tokens_per_s:7,.0f} tok/s  {1000 * record.duration_s:6.0f} ms  gen {generation}"
        )
    note = "  skipped: gradients not finite" if record.skipped else ""
    return (
        f"step {record.step:4d}  loss {record.loss:7.4f}  grad {record.grad_norm:7.3f}  "
        f"{tokens_per_s:7,.0f} tok/s  {1000 * record.duration_s:6.0f} ms  gen {generation}{note}"
    )


def _milliseconds(value: float | None) -> str:
    return "unknown" if value is None else f"{max(0.0, value):.0f} ms"


def _work(seconds: float) -> str:
    """Work that was done in vain is never shown as none."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{max(1.0, 1000 * seconds):.0f} ms"


def _incident_line(incident: Incident) -> str:
    who = listed(incident.ranks)
    if incident.resumed_s is None:
        return f"  {who} at step {incident.step}: not recovered"
    lost = "" if not incident.lost_work_s else f", {_work(incident.lost_work_s)} of work redone"
    lost += f"{incident.kept_note}" if lost else ""
    return (
        f"  {who} at step {incident.step}: detected {_milliseconds(incident.detection_ms)}, "
        f"recovered {_milliseconds(incident.recovery_ms)}, "
        f"{incident.moved_bytes / 2**20:.1f} MiB moved{lost} ({incident.action})"
    )


def _steps(records: Sequence[StepRecord], begun_at: int) -> str:
    """How many there are now, and what is known of the last one."""
    if not records:
        return "0 steps, no step finished"
    if begun_at == len(records) and all(record.is_empty for record in records):
        return f"no step was run, the job began with the saved version of step {begun_at}"
    num_skipped = sum(record.skipped for record in records)
    skipped = f" ({num_skipped} skipped: gradients not finite)" if num_skipped else ""
    return f"{len(records)} steps{skipped}, {_final(records[-1])}"


def _in_incidents(num_lost: int, num_incidents: int) -> str:
    """How many lines follow, where ranks that were lost together share one."""
    if num_lost == num_incidents:
        return ""
    return f" (ranks lost in {num_incidents} incident{'s' if num_incidents != 1 else ''})"


def _final(record: StepRecord) -> str:
    if record.is_empty:
        return "final loss not known"
    return "all emulated" if record.emulated else f"final loss {record.loss:.4f}"


def summary(
    records: Sequence[StepRecord],
    incidents: Sequence[Incident],
    num_plans: int,
    run_dir: Path,
    reason: str,
    *,
    begun_at: int = 0,
) -> str:
    """What happened, from the committed iterations and the incidents.

    `begun_at`: the step of the saved version that the job began with.
    """
    num_lost = sum(len(incident.ranks) for incident in incidents)
    survived = sum(len(incident.ranks) for incident in incidents if incident.resumed_s is not None)
    lines = [
        "",
        f"{reason}: {_steps(records, begun_at)}, {survived} of {num_lost} failures "
        f"survived{_in_incidents(num_lost, len(incidents))}, "
        f"{num_plans} plan{'s' if num_plans != 1 else ''} used",
        *(_incident_line(incident) for incident in incidents),
        f"run directory: {run_dir}",
    ]
    return "\n".join(lines)
