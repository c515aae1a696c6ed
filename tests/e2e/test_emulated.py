"""An emulated job: chunks take their planned time, everything around them is real."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Job, Run, running, train_command

from resihp.errors import UserError
from resihp.monitor.comparison import compare

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """TP 2 x PP 2 x DP 2 with chunks of milliseconds; rank 5 is killed in step 3."""
    folder = tmp_path_factory.mktemp("emulated")
    path = Job(kills=((5, 3),), tokens=2048).write(folder, corpus)
    text = path.read_text().replace("[batch]", '[device]\nkind = "emulated"\n[batch]')
    path.write_text(text)
    with running(train_command(path), folder) as run:
        assert run.finish() == 0, run.text
    return run


def test_every_line_of_an_emulated_job_says_so(emulated: Run) -> None:
    lines = [line for line in emulated.text.splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith("  rank ")]
    assert all("emulated" in line for line in told), emulated.text
    assert emulated.dir.name.startswith("emulated-")
    assert all(row["emulated"] and row["loss"] is None for row in emulated.rows("metrics"))


def test_an_emulated_job_survives_the_loss_of_a_rank(emulated: Run) -> None:
    """The real control plane: killed, detected, adapted to a verified plan, all steps done."""
    assert [row["step"] for row in emulated.rows("metrics")] == list(range(10))
    (lost,) = emulated.events("rank_lost")
    assert lost["rank"] == 5
    assert len(emulated.events("running")) == 2
    (incident,) = emulated.events("incident")
    assert incident["resumed_s"] > incident["detected_s"]
    (stop,) = emulated.events("stop")
    assert stop["reason"] == "finished"


def test_iterations_are_no_faster_than_planned(emulated: Run) -> None:
    """The plan that was adapted says what an iteration takes; no emulated one takes less."""
    (decision,) = emulated.events("decision")
    after = [row["iteration_s"] for row in emulated.rows("metrics") if row["step"] > 3]
    # The update at the end is in the plan's time and not in the record's.
    assert min(after) > 0.9 * decision["iteration_s"]


def test_an_emulated_run_cannot_be_compared(emulated: Run) -> None:
    with pytest.raises(UserError, match="emulated"):
        compare(emulated.dir, emulated.dir)


def test_a_cluster_is_said_of_emulated_devices_only(tmp_path: Path, corpus: Path) -> None:
    path = Job().write(tmp_path, corpus)
    path.write_text(path.read_text().replace("[batch]", '[device]\ncluster = "cpu-box"\n[batch]'))
    with running(train_command(path), tmp_path) as run:
        assert run.finish() == 2
    assert "device.cluster" in run.text


def test_healthy_and_emulated_jobs_have_the_same_plan(healthy: Run, tmp_path: Path) -> None:
    """Emulation changes no decision: only what a chunk does."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.py").write_text("x = 1\n" * 2000)
    path = Job(steps=2).write(tmp_path, corpus)
    path.write_text(path.read_text().replace("[batch]", '[device]\nkind = "emulated"\n[batch]'))
    with running(train_command(path), tmp_path) as run:
        assert run.finish() == 0, run.text
    first = (run.dir / "plans" / "001.plan").read_text()
    assert first == (healthy.dir / "plans" / "001.plan").read_text()
