"""What healthy ranks finished of an interrupted iteration is kept, as real processes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from deaths import JOB, STEP, Death, died, wrong_after
from jobs import Run, complete, running, train_command

from resihp.ir.kept import kept_by, weights_run_at
from resihp.ir.parser import parse
from resihp.ir.verify import has_errors, verify

pytestmark = pytest.mark.timeout(120)
LAYERS = 2
"""One for each stage: they cannot move, so nothing has to wait."""


@pytest.fixture(scope="module")
def alive(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """The job without a death."""
    code, run = complete(replace(JOB, layers=LAYERS), tmp_path_factory.mktemp("alive"), corpus)
    assert code == 0, run.text
    return run


def test_what_is_kept_changes_no_loss_and_no_sample(alive: Run, tmp_path: Path, corpus: Path):
    """[T1] [T16] [T17] [T19] Who dies in the vote finds all others done; the share is told."""
    death = Death(1, "vote")
    code, run = died(death, tmp_path, corpus, LAYERS)
    assert wrong_after(death, code, run, alive) == []
    (incident,) = run.events("incident")
    assert (incident["num_kept"], incident["num_micro_batches"]) == (4, 8)
    assert incident["redone_share"] == 0.5
    assert f"step {STEP} is redone but for 4 of 8 micro-batches" in run.text
    plans = {
        name: parse((run.dir / "plans" / f"{name}.plan").read_text(encoding="utf-8"))
        for name in ("001", "002", "002.steady")
    }
    assert not has_errors(verify(plans["002"], previous=plans["001"].plan))
    assert not has_errors(verify(plans["002.steady"], previous=plans["002"].plan))
    kept = kept_by(plans["002"].plan)
    assert len(kept) == 4
    assert not any(
        kept & of_stage.keys() for of_stage in weights_run_at(plans["002"].plan).values()
    )


def two_deaths(second: str, folder: Path, corpus: Path) -> Run:
    """Rank 3 holds its lock from its first instruction on and is killed once ranks 0 and 1, the
    other replica, wait for the last of all: the reduction. Another death, `second`, follows."""
    held = (
        f'[[inject]]\nkind = "hold_gil"\nrank = 3\nstep = {STEP}\ninstruction = 0\nlasts_s = 600\n'
    )
    sections = JOB.sections + held + second
    job = replace(JOB, layers=LAYERS, sections=sections, detect_within_s=10.0)
    with running(train_command(job.write(folder, corpus)), folder) as run:
        run.read_to_step(STEP - 1)
        while not all("waits at `reduce_grads`" in line for line in run.where()[1:3]):
            pass
        os.kill(run.executor_pid(3), signal.SIGKILL)
        assert run.finish() == 0, run.text
    return run


@pytest.mark.parametrize(
    "second",
    [Death(2, 12), Death(2, "groups"), Death(2, "joined")],
    ids=lambda death: f"{death.place}",
)
def test_what_is_kept_outlives_a_death_in_what_is_redone_and_before(
    second: Death, alive: Run, tmp_path: Path, corpus: Path
):
    """[T1] [T4] [T5] Rank 2 gets to its backward in the iteration that is redone, which it did not
    before; or it dies while the generation opens that is to redo it."""
    run = two_deaths(second.injection, tmp_path, corpus)
    assert run.losses() == alive.losses()
    assert run.rows("ledger") == alive.rows("ledger")
    assert [row["rank"] for row in run.events("rank_lost")] == [3, 2]
    assert {row["num_kept"] for row in run.events("incident")} == {4}
