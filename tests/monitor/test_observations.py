"""Observed times on disk: what is kept of a run, and one iteration of it as a picture."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from coordinator_cases import job_of

from resihp.cli import main
from resihp.compiler import initial_plan
from resihp.config import resolved
from resihp.errors import UserError
from resihp.ir.drawing.scene import scene_of
from resihp.ir.drawing.trace import trace_of
from resihp.ir.expand import expand
from resihp.ir.model import GroupName, Op
from resihp.ir.printer import print_plan
from resihp.monitor import observations as module
from resihp.monitor.observations import ObservationLog, observations, played_run
from resihp.monitor.run_dir import RunDir
from resihp.wire.messages import Observed

JOB = job_of(tp=1, pp=2, dp=1)
PLAN = initial_plan(JOB.model.shape("sim"), JOB.parallel.mesh(), JOB.batch.batch())
SIZES = {rank: len(expand(PLAN, rank).instrs) for rank in (0, 1)}


def seen(rank: int, step: int, generation: int = 1) -> Observed:
    """Each instruction takes 2 ms after one of 1 ms, but for the first, which did nothing."""
    starts = array("q", [0, *(1000 + 3_000_000 * index for index in range(1, SIZES[rank]))])
    ends = array("q", [0, *(start + 2_000_000 for start in starts[1:])])
    return Observed(
        generation=generation, step=step, starts_ns=starts.tobytes(), ends_ns=ends.tobytes()
    )


@pytest.fixture
def run(tmp_path) -> Path:
    """A run directory with a job and the plan of its first generation."""
    (tmp_path / "plans").mkdir()
    (tmp_path / "job.toml").write_text(resolved(JOB), encoding="utf-8")
    RunDir(tmp_path).plan(1, print_plan(PLAN), "start")
    return tmp_path


def fill(run: Path, *iterations: tuple[int, Observed]) -> None:
    log = ObservationLog(RunDir(run).traces_path)
    for rank, observed in iterations:
        log.add(rank, observed)
    log.close()
    assert not log.trouble


def test_what_is_written_is_read_in_order(run):
    """Across the ends of segments."""
    written = [(rank, seen(rank, step)) for step in range(3) for rank in (0, 1)]
    fill(run, *written)
    assert list(observations(run)) == written


def test_of_a_long_run_the_newest_segments_are_kept_and_the_first(run, monkeypatch):
    """What it takes on disk is bounded."""
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1)
    fill(run, *((0, seen(0, step)) for step in range(20)))
    kept = [observed.step for _, observed in observations(run)]
    assert kept == [0, *range(13, 20)]
    assert len(kept) == module.MAX_SEGMENTS


def test_a_disk_that_takes_nothing_holds_nobody_up(tmp_path):
    """What was not kept is counted, and said at the end."""
    (tmp_path / "traces").write_text("a file where the folder should be")
    log = ObservationLog(tmp_path / "traces")
    for step in range(3):
        log.add(0, seen(0, step))
    log.close()
    assert log.trouble.startswith("the times of 3 iterations of ranks were not kept: [Errno ")


def test_what_a_slow_disk_leaves_behind_is_bounded(tmp_path, monkeypatch):
    """What comes while too much waits is dropped, and counted."""
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    log = ObservationLog(tmp_path / "traces")
    for step in range(5):
        log.add(0, seen(0, step))
    log.close()
    assert log.trouble == "the times of 3 iterations of ranks were not kept: the disk was too slow"


def test_a_segment_that_is_still_written_is_read_up_to_where_it_is(run):
    """A coordinator that was killed, or one that writes right now."""
    fill(run, (0, seen(0, 0)), (1, seen(1, 0)))
    (path,) = RunDir(run).traces_path.iterdir()
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert len(list(observations(run))) <= 1


def test_a_damaged_segment_is_refused_by_name(run):
    """Its bytes are no message."""
    fill(run, (0, seen(0, 0)))
    (path,) = RunDir(run).traces_path.iterdir()
    path.write_bytes(path.read_bytes()[:4] + b"x" * (path.stat().st_size - 4))
    with pytest.raises(UserError, match=r"0000\.seen: damaged at byte 0"):
        list(observations(run))


def test_an_iteration_is_played_as_its_ranks_saw_it(run):
    """Seconds from its first moment; what did nothing takes no time."""
    fill(run, *((rank, seen(rank, 4)) for rank in (0, 1)))
    played = played_run(run, None)
    assert played.clock.note == "seen in step 4 of generation 1 on cpu"
    name = GroupName(0, 0)
    starts, ends = played.timeline.starts[name], played.timeline.ends[name]
    assert (starts[0], ends[0]) == (0.0, 0.0)
    assert (starts[1], ends[1]) == pytest.approx((0.0, 0.002))
    assert (starts[3], ends[3]) == pytest.approx((0.006, 0.008))
    computed = [event for event in trace_of(scene_of(played)).traceEvents if event.cat == "compute"]
    assert len(computed) == sum(
        instr.op.is_compute for rank in (0, 1) for instr in expand(PLAN, rank).instrs
    )
    assert {event.dur for event in computed} <= {0.0, 2000.0}


def test_the_text_of_a_run_is_a_table_and_says_what_draws_it(run, capsys):
    """Memory was not seen, so it has no column."""
    fill(run, *((rank, seen(rank, 4)) for rank in (0, 1)))
    assert main(["show", str(run)]) == 0
    head, columns, *rows, blank, hint = capsys.readouterr().out.splitlines()
    assert head.startswith("seen in step 4 of generation 1 on cpu: ")
    assert columns.split() == ["busy", "idle"]
    assert [row.split()[0] for row in rows] == ["dp0.pp0", "dp0.pp1"]
    assert not blank
    assert "--format svg" in hint


def test_the_last_whole_iteration_is_shown_unless_one_is_named(run):
    """Of the last step one rank is missing; a step that was redone counts as it was committed."""
    fill(
        run,
        *((rank, seen(rank, step)) for step in (0, 1) for rank in (0, 1)),
        *((rank, seen(rank, 1, generation=2)) for rank in (0, 1)),
        (0, seen(0, 2, generation=2)),
    )
    RunDir(run).plan(2, print_plan(PLAN), "again")
    assert "step 1 of generation 2" in played_run(run, None).clock.note
    assert "step 0 of generation 1" in played_run(run, 0).clock.note
    with pytest.raises(UserError, match="all of step 2 are not there; kept are steps 0 to 2"):
        played_run(run, 2)


def test_what_is_no_run_is_refused(tmp_path):
    """With where such times would be."""
    with pytest.raises(UserError, match="they are in the directory of a run"):
        played_run(tmp_path, None)


def test_times_of_another_plan_are_refused(run):
    """They have another number of instructions."""
    short = seen(0, 0)
    short = Observed(generation=1, step=0, starts_ns=short.starts_ns[8:], ends_ns=b"")
    fill(run, (0, short), (1, seen(1, 0)))
    with pytest.raises(UserError, match="the plan has"):
        played_run(run, 0)


def test_a_program_has_an_instruction_for_each_of_its_stream():
    """So the index of an observation is one into the stream."""
    for rank in (0, 1):
        group = PLAN.group_of(rank)
        assert group is not None
        (stream,) = (s for s in PLAN.streams if s.pp == group.pp)
        assert SIZES[rank] == len(stream.body)
        assert stream.body[-1].op is Op.STEP
