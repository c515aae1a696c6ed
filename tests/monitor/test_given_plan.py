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
from resihp.monitor.preflight import check_job


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
    text = f"# a line more\n{Planner(job).initial().text}"
    line = text[: text.index("  F 1\n")].count("\n") + 1
    says = rf"parallel.plan = .*x.plan:{line}: RHP302: .* \(and 1 more\); `resihp verify .*`"
    with pytest.raises(PlanRejected, match=says):
        Planner(naming(job, tmp_path, text.replace("  F 1\n", "  F 0\n", 1))).initial()


def test_a_plan_that_does_not_fit_the_jobs_devices_is_no_fault_of_the_file(tmp_path: Path):
    """`resihp verify` of the file alone would find nothing."""
    job = job_of()
    text = Planner(job).initial().text
    small = msgspec.structs.replace(job.device, memory="64KiB")
    job = msgspec.structs.replace(job, device=small)
    with pytest.raises(PlanRejected, match=r"the capacity is device\.memory of the job file"):
        Planner(naming(job, tmp_path, text)).initial()


def test_a_plan_says_itself_which_stages_recompute(tmp_path: Path):
    """A job that wants it is not begun without; a schedule of torch has no way to say it."""
    job = recomputing(job_of(pp=2))
    text = Planner(job_of(pp=2)).initial().text
    with pytest.raises(ConfigError, match=r"compute.recompute = true, .*write `recompute 0,1`"):
        Planner(naming(job, tmp_path, text)).initial()
    said = Planner(job).initial().text
    assert Planner(naming(job, tmp_path, said)).initial().plan.recompute == (0, 1)
    assert Planner(with_csv(job, tmp_path, COMPUTE)).initial().plan.recompute == (0, 1)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("plan", "nowhere.plan", "job.toml:2: parallel.plan = .*no such file"),
        ("memory", "64KiB", "job.toml:4: device.memory = "),
        ("cluster", "nope", "job.toml:5: device.cluster: cluster 'nope' is no preset"),
    ],
)
def test_what_stops_a_job_before_it_starts_has_a_line(
    tmp_path: Path, key: str, value: str, message: str
):
    """That of the key in the job file."""
    path = tmp_path / "job.toml"
    path.write_text('[parallel]\nplan = "x"\n[device]\nmemory = "x"\ncluster = "x"\n')
    job = job_of()
    section = "parallel" if key == "plan" else "device"
    wrong = msgspec.structs.replace(getattr(job, section), **{key: value})
    with pytest.raises(ConfigError, match=message):
        check_job(msgspec.structs.replace(job, **{section: wrong}), path)


def recomputing(job: JobConfig) -> JobConfig:
    compute = msgspec.structs.replace(job.compute, recompute=True)
    return msgspec.structs.replace(job, compute=compute)


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
