"""What healthy ranks finished of an interrupted iteration is kept, as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from deaths import JOB, STEP, Death, died, wrong_after
from jobs import Job, Run, complete, running, train_command

from resihp.ir.kept import kept_by, weights_run_at
from resihp.ir.model import Plan
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


def text_of(run: Run, name: str) -> str:
    return (run.dir / "plans" / f"{name}.plan").read_text(encoding="utf-8")


def plan_of(run: Run, name: str) -> Plan:
    return parse(text_of(run, name)).plan


def follows(run: Run, name: str, before: str) -> bool:
    """Whether a plan of the run is sound after another one."""
    return not has_errors(verify(parse(text_of(run, name)), previous=plan_of(run, before)))


def test_what_is_kept_changes_no_loss_and_no_sample(alive: Run, tmp_path: Path, corpus: Path):
    """[T1] [T16] [T17] [T19] Who dies in the vote finds all others done; the share is told."""
    death = Death(1, "vote")
    code, run = died(death, tmp_path, corpus, LAYERS)
    assert wrong_after(death, code, run, alive) == []
    (incident,) = run.events("incident")
    assert (incident["num_kept"], incident["num_micro_batches"]) == (4, 8)
    assert incident["redone_share"] == 0.5
    assert f"step {STEP} is redone but for 4 of 8 micro-batches" in run.text
    assert follows(run, "002", "001")
    assert follows(run, "002.steady", "002")
    redone = plan_of(run, "002")
    assert len(kept_by(redone)) == 4
    assert not any(kept_by(redone) & of.keys() for of in weights_run_at(redone).values())


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


def slow(rank: int, step: int, factor: float, lasts_s: float) -> str:
    """From the first instruction of `rank` in `step` on."""
    place = f"rank = {rank}\nstep = {step}\ninstruction = 0\n"
    return f'[[inject]]\nkind = "slow"\n{place}factor = {factor}\nlasts_s = {lasts_s}\n'


def test_a_replica_that_is_done_helps_one_that_is_not(tmp_path: Path, corpus: Path):
    """[T1] [T19] Rank 0 has all of its micro-batches when rank 2 dies, slow rank 1 has hardly one:
    both run a half of what is redone, and losses are those without faults, bit for bit."""
    faulted, healthy = tmp_path / "faulted", tmp_path / "healthy"
    faulted.mkdir()
    healthy.mkdir()
    trio = Job(steps=6, tp=1, pp=1, dp=3, layers=2, sections=JOB.sections, detect_within_s=10.0)
    sections = JOB.sections + slow(1, STEP, factor=1000.0, lasts_s=6.0)
    path = replace(trio, sections=sections).write(faulted, corpus)
    with running(train_command(path), faulted) as run:
        run.read_to_step(STEP - 1)
        while "waits at `reduce_grads`" not in run.where()[1]:
            pass
        os.kill(run.executor_pid(2), signal.SIGKILL)
        assert run.finish() == 0, run.text
    code, without = complete(trio, healthy, corpus)
    assert code == 0, without.text
    assert run.losses() == without.losses()
    assert run.rows("ledger") == without.rows("ledger")
    assert follows(run, "002", "001")
    assert follows(run, "002.steady", "002")
    (of_stage,) = weights_run_at(plan_of(run, "002")).values()
    shares = Counter(of_stage.values())
    assert sum(shares.values()) >= 7
    assert abs(shares[0] - shares[1]) <= 1, "in the order of the steady plan rank 0 has two"


def test_a_partition_that_waits_for_the_boundary_costs_no_iteration(tmp_path: Path, corpus: Path):
    """[T17] Iterations are long, so the layers move only after the one that was interrupted, of
    which a half is kept: all yield there, and losses and samples are those without a death."""
    faulted, healthy = tmp_path / "faulted", tmp_path / "healthy"
    faulted.mkdir()
    healthy.mkdir()
    death = Death(1, "vote")
    sections = JOB.sections + slow(3, STEP - 1, factor=500.0, lasts_s=3.0) + death.injection
    code, run = complete(replace(JOB, sections=sections), faulted, corpus)
    again, without = complete(JOB, healthy, corpus)
    assert again == 0, without.text
    assert wrong_after(death, code, run, without) == []
    command = [sys.executable, "-m", "resihp", "compare", str(run.dir), str(without.dir)]
    compared = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compared.returncode == 0, compared.stdout
    (incident,) = run.events("incident")
    assert incident["num_kept"] == 4
    assert [row["step"] for row in run.events("repartition")] == [STEP]
    assert not run.events("taken_back")
    layers = [
        {group.name: group.layers for group in plan_of(run, name).groups}
        for name in ("002", "002.steady", "003")
    ]
    assert layers[0] == layers[1] != layers[2]
    assert plan_of(run, "003").resume is None or not kept_by(plan_of(run, "003"))
    assert follows(run, "003", "002.steady")
