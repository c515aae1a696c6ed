"""What healthy ranks finished of an interrupted iteration is kept, as real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from deaths import JOB, STEP, Death, died, wrong_after
from jobs import Job, Run, complete

from resihp.ir.kept import kept_by, weights_run_at
from resihp.ir.parser import parse
from resihp.ir.verify import has_errors, verify

pytestmark = pytest.mark.timeout(120)
LAYERS = 2
"""One for each stage: they cannot move, so nothing has to wait."""


@pytest.fixture(scope="module")
def alive(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """The job without a death."""
    job = Job(**{**vars(JOB), "layers": LAYERS})
    code, run = complete(job, tmp_path_factory.mktemp("alive"), corpus)
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


def test_what_was_kept_once_is_kept_again(alive: Run, tmp_path: Path, corpus: Path):
    """[T1] [T4] A death in the very iteration that is redone: rank 2 gets to its backward there."""
    kill = '[[inject]]\nkind = "kill"\nrank = {}\nstep = 3\ninstruction = {}\n'
    sections = JOB.sections + kill.format(3, 0) + kill.format(2, 12)
    job = Job(**{**vars(JOB), "layers": LAYERS, "sections": sections})
    code, run = complete(job, tmp_path, corpus)
    assert code == 0, run.text
    assert run.losses() == alive.losses()
    assert run.rows("ledger") == alive.rows("ledger")
    first, second = run.events("incident")
    assert (first["ranks"], second["ranks"]) == ([3], [2])
    if first["num_kept"] == 4:  # all that the other replica has was done before it was told
        assert second["num_kept"] == 4


@pytest.mark.parametrize("moment", ["groups", "joined"])
def test_a_death_before_it_is_redone_keeps_it_too(
    moment: str, alive: Run, tmp_path: Path, corpus: Path
):
    """[T1] [T4] [T5] While the generation that is to redo the iteration opens."""
    death = Death(2, moment)
    code, run = died(death, tmp_path, corpus, LAYERS)
    assert wrong_after(death, code, run, alive) == []
    assert len(run.events("rank_lost")) == 2
