"""The lines that an operator reads, to the letter."""

from __future__ import annotations

from pathlib import Path

import msgspec
from coordinator_cases import record_of

from resihp.monitor.incident import Incident
from resihp.monitor.summary import step_line, summary
from resihp.wire.messages import StepRecord

RECORD = msgspec.structs.replace(
    record_of(12, 2.34567), grad_norm=0.98765, num_tokens=2048, duration_s=0.25
)


def incident(**changes: object) -> Incident:
    usual = Incident(
        ranks=[5],
        evidence="its executor ended with signal 9",
        detected_s=10.004,
        step=7,
        hit_s=10.0,
        resumed_s=10.404,
        lost_work_s=0.123,
        moved_bytes=3 << 20,
        action="dp1.pp0 TP 2 -> 1",
    )
    return msgspec.structs.replace(usual, **changes)


def test_a_step_has_one_line():
    """Loss, norm, speed, time and generation, in columns."""
    assert step_line(RECORD, 2) == (
        "step   12  loss  2.3457  grad   0.988    8,192 tok/s     250 ms  gen 2"
    )


def test_a_skipped_step_says_so():
    """Its numbers may not be numbers."""
    skipped = msgspec.structs.replace(
        RECORD, loss=float("nan"), grad_norm=float("inf"), skipped=True
    )
    assert step_line(skipped, 1) == (
        "step   12  loss     nan  grad     inf    8,192 tok/s     250 ms  gen 1"
        "  skipped: gradients not finite"
    )


def test_the_summary_of_a_run_with_a_failure():
    """What happened, what it cost, where the files are."""
    lines = summary([record_of(0), RECORD], [incident()], 2, Path("/runs/a"), "finished")
    assert lines.split("\n") == [
        "",
        "finished: 2 steps, final loss 2.3457, 1 of 1 failures survived, 2 plans used",
        "  rank 5 at step 7: detected 4 ms, recovered 400 ms, 3.0 MiB moved, 0.12 s of work redone "
        "(dp1.pp0 TP 2 -> 1)",
        "run directory: /runs/a",
    ]


def test_the_summary_of_a_run_without_failures():
    """No line is wasted."""
    assert summary([RECORD], [], 1, Path("r"), "finished").split("\n")[1] == (
        "finished: 1 steps, final loss 2.3457, 0 of 0 failures survived, 1 plan used"
    )


def test_a_resumed_run_without_a_step_claims_none():
    """Steps before the saved version were another run's, and so was their loss."""
    before = [StepRecord.empty(step) for step in range(3)]
    line = summary(before, [], 1, Path("r"), "stopped by SIGTERM", begun_at=3).split("\n")[1]
    assert line.startswith(
        "stopped by SIGTERM: no step was run, the job began with the saved version of step 3, 0 of"
    )
    line = summary([*before, record_of(3, 1.5)], [], 1, Path("r"), "finished", begun_at=3)
    assert "finished: 4 steps, final loss 1.5000" in line
    assert "3 steps, final loss not known" in summary(before, [], 1, Path("r"), "finished")


def test_what_is_not_known_is_not_made_up():
    """A death that nobody announced has no detection time; a fatal one no recovery."""
    silent = incident(hit_s=None, lost_work_s=None, ranks=[1, 4])
    fatal = incident(resumed_s=None, step=9)
    lines = summary([], [silent, fatal], 3, Path("r"), "no plan").split("\n")
    assert lines[1:4] == [
        "no plan: 0 steps, no step finished, 2 of 3 failures survived (ranks lost in 2 "
        "incidents), 3 plans used",
        "  ranks 1, 4 at step 7: detected unknown, recovered 400 ms, 3.0 MiB moved "
        "(dp1.pp0 TP 2 -> 1)",
        "  rank 5 at step 9: not recovered",
    ]


def test_work_that_is_redone_is_never_none():
    """A rank that was lost in a recovery redoes nothing more; one just after a step, a little."""
    (_, _, little, nothing, _) = summary(
        [RECORD], [incident(lost_work_s=0.0004), incident(lost_work_s=0.0)], 3, Path("r"), "end"
    ).split("\n")
    assert "1 ms of work redone" in little
    assert "redone" not in nothing


def test_an_incident_as_an_event_has_its_derived_times():
    """Beside everything it is made of."""
    row = incident().row()
    assert round(row["detection_ms"], 6) == 4  # type: ignore[call-overload]
    assert round(row["recovery_ms"], 6) == 400  # type: ignore[call-overload]
    assert row["ranks"] == [5]
    assert incident(hit_s=None, resumed_s=None).row()["detection_ms"] is None


def test_an_emulated_run_says_so_and_has_no_loss():
    """Nothing was computed, so there is no number that could be taken for one of a real run."""
    emulated = msgspec.structs.replace(RECORD, loss=0.0, grad_norm=0.0, emulated=True)
    assert step_line(emulated, 2) == (
        "step   12  emulated, nothing computed    8,192 tok/s     250 ms  gen 2"
    )
    assert "1 steps, all emulated" in summary([emulated], [], 1, Path("r"), "finished")
