"""Whole jobs of every kind that the executor runs, each beside a plain one."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import TP_CHANGE_TOLERANCE, Job, Run, complete

pytestmark = pytest.mark.timeout(120)

BF16_TOLERANCE = 0.01
"""A weight has 8 bits in bf16: rounding is 2**-9 of each, and a loss of ln 258 changes by less
than a hundredth of itself in a few steps; one lost micro-batch of 8 changes it by more."""


def run_of(job: Job, folder: Path, corpus: Path) -> Run:
    folder.mkdir()
    code, run = complete(job, folder, corpus)
    assert code == 0, run.text
    return run


def test_two_stages_a_rank_in_a_v_survive_a_kill(
    healthy: Run, tmp_path: Path, corpus: Path
) -> None:
    """ZBV trains the same model, and goes on with fewer ranks from the step that broke."""
    job = Job(steps=5, schedule="zbv", kills=((3, 3),))
    run = run_of(job, tmp_path / "zbv", corpus)
    assert "1 of 1 failures survived" in run.text
    assert run.losses()[:3] == healthy.losses()[:3]
    # The cosine of the learning rate ends sooner in the shorter run.
    full = run_of(Job(steps=5), tmp_path / "full", corpus)
    assert run.losses() == pytest.approx(full.losses(), rel=TP_CHANGE_TOLERANCE)


def test_a_schedule_of_torch_trains_in_every_replica(
    healthy: Run, tmp_path: Path, corpus: Path
) -> None:
    """A CSV of torch's interleaved 1F1B is a plan like any other, and no bit of a loss differs."""
    table = tmp_path / "interleaved.csv"
    table.write_text(INTERLEAVED)
    run = run_of(Job(steps=3, plan=table), tmp_path / "csv", corpus)
    assert run.losses() == healthy.losses()[:3]


def test_bf16_trains_like_fp32(tmp_path: Path, corpus: Path, healthy: Run) -> None:
    """With fp32 masters, forwards computed again in B and sums in the order of arrival."""
    sections = '[compute]\nprecision = "bf16"\nnumerics = "fast"\nrecompute = true\n'
    job = Job(steps=5, schedule="zb-h1", kills=((2, 3),), sections=sections)
    run = run_of(job, tmp_path / "bf16", corpus)
    assert "1 of 1 failures survived" in run.text
    full = run_of(Job(steps=5), tmp_path / "full", corpus)
    assert run.losses() == pytest.approx(full.losses(), rel=BF16_TOLERANCE)
    assert run.losses() != full.losses()


def test_tied_tables_of_a_qwen_stay_equal_over_a_loss(tmp_path: Path, corpus: Path) -> None:
    """Both ends of the pipeline have the table, at other TP degrees after the kill."""
    model = 'model_type = "qwen2"\ntie_word_embeddings = true\n'
    job = Job(steps=5, kills=((5, 2),), model=model)
    run = run_of(job, tmp_path / "killed", corpus)
    assert "1 of 1 failures survived" in run.text
    plain = run_of(Job(steps=5, tp=1, pp=1, dp=2, model=model), tmp_path / "plain", corpus)
    assert run.losses() == pytest.approx(plain.losses(), rel=TP_CHANGE_TOLERANCE)


INTERLEAVED = """0F0,0F1,2F0,2F1,0F2,0F3,2F2,2F3,2B0,2B1,0B0,0B1,2B2,2B3,0B2,0B3
1F0,1F1,3F0,3F1,1F2,1F3,3F2,3F3,3B0,3B1,1B0,1B1,3B2,3B3,1B2,1B3
"""
