"""`compare`: losses and samples of two runs, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from resihp.cli import main
from resihp.errors import UserError
from resihp.monitor.comparison import compare
from resihp.monitor.run_dir import RunDir
from resihp.wire.messages import StepRecord


def write_run(path: Path, losses: list[float], *, generation: int = 1, shift: int = 0) -> Path:
    path.mkdir()
    run = RunDir(path)
    for step, loss in enumerate(losses):
        record = StepRecord(
            step=step,
            loss=loss,
            grad_norm=1.0,
            learning_rate=0.1,
            skipped=False,
            num_tokens=8,
            samples=(2 * step + shift, 2 * step + 1 + shift),
            duration_s=0.5,
        )
        run.step(record, 1 if step == 0 else generation)
    run.close()
    return path


def test_equal_runs_are_bitwise_equal(tmp_path: Path) -> None:
    """The same losses from the same samples."""
    result = compare(write_run(tmp_path / "a", [2.0, 1.0]), write_run(tmp_path / "b", [2.0, 1.0]))
    assert result.equal_within(0.0)
    assert result.text.startswith("2 steps in 1 generation: every loss is bitwise equal")


def test_the_first_and_the_worst_difference_are_named(tmp_path: Path) -> None:
    """Rounding after a failure: where it begins, how large it gets."""
    run = write_run(tmp_path / "a", [4.0, 2.0, 1.5, 1.0], generation=2)
    result = compare(run, write_run(tmp_path / "b", [4.0, 2.0, 1.0, 1.01]))
    assert (result.first_difference, result.worst_step, result.worst) == (2, 2, 0.5)
    assert not result.equal_within(0.4)
    assert result.equal_within(0.5)
    assert "bitwise equal before step 2" in result.text
    assert "in 2 generations" in result.text


def test_other_samples_are_never_equal(tmp_path: Path) -> None:
    """Equal losses from other data are a coincidence."""
    run = write_run(tmp_path / "a", [2.0], shift=1)
    result = compare(run, write_run(tmp_path / "b", [2.0]))
    assert not result.equal_within(1.0)
    assert "OTHER samples" in result.text


def test_runs_of_different_length_are_refused(tmp_path: Path) -> None:
    """A run that was stopped cannot be compared with one that finished."""
    run = write_run(tmp_path / "a", [2.0])
    with pytest.raises(UserError, match=r"1 steps and .* has 2"):
        compare(run, write_run(tmp_path / "b", [2.0, 1.0]))


def test_the_verb_returns_1_where_losses_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code and text of `resihp compare`."""
    a, b = write_run(tmp_path / "a", [2.0]), write_run(tmp_path / "b", [2.5])
    assert main(["compare", str(a), str(b)]) == 1
    assert "differ by at most 2.0e-01" in capsys.readouterr().out
    assert main(["compare", str(a), str(b), "--tolerance", "0.3"]) == 0
    assert main(["compare", str(a)]) == 2
    assert main(["compare", str(a), str(tmp_path / "none")]) == 2
