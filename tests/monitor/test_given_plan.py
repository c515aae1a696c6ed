"""A plan that the job file names: read, compared with the job, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from coordinator_cases import job_of

from resihp.config import JobConfig
from resihp.errors import ConfigError, PlanRejected
from resihp.ir.model import Resume
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.monitor.planner import Planner


def test_the_plan_of_the_file_is_the_first_one(tmp_path: Path):
    """With the capacity of the job's devices, whatever memory line it had."""
    job = job_of()
    plan = Planner(job).initial().plan
    other = msgspec.structs.replace(plan, schedule=None, memory_bytes=None)
    chosen = Planner(naming(job, tmp_path, print_plan(other))).initial()
    assert chosen.plan == msgspec.structs.replace(other, memory_bytes=plan.memory_bytes)


def test_a_plan_for_another_job_is_refused(tmp_path: Path):
    """The sentence names the first value that differs."""
    job = job_of()
    text = Planner(job).initial().text.replace("microbatches=2", "microbatches=8")
    with pytest.raises(ConfigError, match="its batch line says microbatches=8, the job file micro"):
        Planner(naming(job, tmp_path, text)).initial()


def test_a_plan_that_goes_on_from_another_is_refused(tmp_path: Path):
    """There is no state yet that it could take over."""
    job = job_of()
    plan = msgspec.structs.replace(Planner(job).initial().plan, resume=Resume(step=3))
    with pytest.raises(ConfigError, match="a job begins with a whole one"):
        Planner(naming(job, tmp_path, print_plan(plan))).initial()


def test_a_plan_with_a_fault_is_refused_by_the_verifier(tmp_path: Path):
    """A micro-batch that is run twice."""
    job = job_of()
    text = Planner(job).initial().text.replace("  F 1\n", "  F 0\n", 1)
    with pytest.raises(PlanRejected, match="the verifier refused the plan"):
        Planner(naming(job, tmp_path, text)).initial()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "no such file or directory"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"plan 1\nnonsense\n", "`resihp verify .*` shows where"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, data: bytes | None, message: str):
    """With the key of the job file."""
    path = tmp_path / "x.plan"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"parallel.plan = .*{message}"):
        Planner(with_plan(job_of(), path)).initial()


def naming(job: JobConfig, folder: Path, text: str) -> JobConfig:
    path = folder / "x.plan"
    path.write_text(text)
    assert parse(text).plan is not None
    return with_plan(job, path)


def with_plan(job: JobConfig, path: Path) -> JobConfig:
    parallel = msgspec.structs.replace(job.parallel, plan=str(path))
    return msgspec.structs.replace(job, parallel=parallel)


COMPUTE = "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n"
"""torch's 1F1B of two micro-batches, without communication."""


def test_a_schedule_of_torch_runs_in_every_replica(tmp_path: Path):
    """Each row is a position; model, tokens and degrees are those of the job."""
    job = job_of(pp=2)
    plan = Planner(with_csv(job, tmp_path, COMPUTE)).initial().plan
    assert plan.mesh == job.parallel.mesh()
    assert plan.model == job.model.shape("csv")
    assert {stream.replicas for stream in plan.streams} == {tuple(range(plan.mesh.dp))}
    assert {group.tp for group in plan.groups} == {plan.mesh.tp}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F1,0B0,0B1\n", "it has 1 rows, the job file parallel.pp = 2; nearest valid: 1"),
        ("0F0,0B0\n1F0,1B0\n", "it has 1 micro-batches, the job file batch.microbatches = 2"),
        ("0F0,nonsense\n1F0\n", "`resihp verify .*torch.csv` shows where"),
    ],
)
def test_a_schedule_of_torch_for_another_job_is_refused(tmp_path: Path, text: str, message: str):
    """Each in one sentence that names the file."""
    with pytest.raises(ConfigError, match=message):
        Planner(with_csv(job_of(pp=2), tmp_path, text)).initial()


def with_csv(job: JobConfig, folder: Path, text: str) -> JobConfig:
    path = folder / "torch.csv"
    path.write_text(text)
    return with_plan(job, path)
