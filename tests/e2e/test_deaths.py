"""A rank dies at the worst moments: a sample of `make sweep`, as real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from deaths import JOB, Death, all_deaths, died, wrong_after
from jobs import Run, complete

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def alive(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    """The job without a death."""
    code, run = complete(JOB, tmp_path_factory.mktemp("alive"), corpus)
    assert code == 0, run.text
    return run


@pytest.mark.parametrize(
    "death",
    [Death(0, 0), Death(1, "vote"), Death(2, "voted"), Death(0, "update")],
    ids=lambda death: f"{death.rank}-{death.place}",
)
def test_a_death_changes_no_loss_and_no_sample(
    death: Death, alive: Run, tmp_path: Path, corpus: Path
):
    """[T1] At the first instruction, in the vote, between vote and update, in the update."""
    code, run = died(death, tmp_path, corpus)
    assert wrong_after(death, code, run, alive) == []


@pytest.mark.parametrize(
    "death",
    [Death(2, "groups"), Death(0, "state"), Death(2, "joined")],
    ids=lambda death: f"{death.rank}-{death.place}",
)
def test_a_death_in_the_recovery_from_another_changes_nothing_either(
    death: Death, alive: Run, tmp_path: Path, corpus: Path
):
    """[T1] [T4] [T5] While groups are built, while state moves, while waiting for the others."""
    code, run = died(death, tmp_path, corpus)
    assert wrong_after(death, code, run, alive) == []
    assert len(run.events("rank_lost")) == 2


def test_the_sweep_has_every_instruction_of_every_rank(alive: Run):
    """[T1] And the moments that are no instruction."""
    deaths = list(all_deaths(alive.runs_dir.parent / "job.toml"))
    assert len(deaths) == len(set(deaths))
    for rank in range(JOB.world):
        instructions = [d.place for d in deaths if d.rank == rank and isinstance(d.place, int)]
        assert instructions == list(range(len(instructions)))
        assert len(instructions) > 15
