"""A job that cannot go on from a saved version is told so before any process is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from coordinator_cases import job_of

from resihp.checkpoint.manifest import (
    Chunk,
    Manifest,
    Part,
    PartFile,
    Position,
    TensorEntry,
    data_name,
    encode,
    part_name,
    sha256,
)
from resihp.checkpoint.versions import complete, version_name
from resihp.config import CheckpointConfig, JobConfig
from resihp.errors import ConfigError
from resihp.monitor.preflight import check_job
from resihp.monitor.saved_model import saved_shapes

STEP = 3
JOB = job_of(steps=9)
TEXT = "[job]\nsteps = 9\n[checkpoint]\nresume = true\n"


def save(directory: Path, job: JobConfig, step: int) -> str:
    """A version of `job` in one part, of zeros that nobody reads; its name."""
    shapes = saved_shapes(job.model)
    part = Part(
        step=step,
        num_tensors=len(shapes),
        tensors={name: TensorEntry(shape=shape) for name, shape in shapes.items()},
        chunks=tuple(
            Chunk(tensor=name, offsets=(0,) * len(shape), sizes=shape, sha256="0" * 64)
            for name, shape in shapes.items()
        ),
    )
    name, raw = version_name(step, "run", 1), encode(part)
    (directory / name).mkdir(parents=True)
    (directory / name / part_name(0)).write_bytes(raw)
    with open(directory / name / data_name(0), "wb") as data:
        data.truncate(part.num_bytes)
    manifest = Manifest(
        step=step,
        updates=step,
        loss=None,
        position=Position(
            dataset="d",
            seed=job.job.seed,
            tokens=job.batch.tokens,
            num_microbatches=job.parallel.dp * job.batch.microbatches,
        ),
        run="run",
        generation=1,
        parts=(
            PartFile(
                rank=0, part_bytes=len(raw), part_sha256=sha256(raw), data_bytes=part.num_bytes
            ),
        ),
    )
    complete(directory, name, manifest)
    return name


def changed(job: JobConfig, section: str, **values: object) -> JobConfig:
    new: Any = msgspec.structs.replace(getattr(job, section), **values)
    return msgspec.structs.replace(job, **{section: new})


def check(tmp_path: Path, job: JobConfig) -> None:
    """As `resihp train` does, in a directory with two intact versions of `JOB`."""
    versions = tmp_path / "versions"
    for step in (STEP - 1, STEP):
        save(versions, JOB, step)
    (tmp_path / "job.toml").write_text(TEXT)
    resumes = CheckpointConfig(dir=str(versions), resume=True)
    check_job(
        changed(msgspec.structs.replace(job, checkpoint=resumes), "job", runs_dir=str(tmp_path)),
        tmp_path / "job.toml",
    )


def test_the_same_job_in_another_layout_may_resume(tmp_path: Path):
    """Nothing but the model and the data counts."""
    check(tmp_path, changed(JOB, "parallel", tp=1, pp=2))


@pytest.mark.parametrize(
    ("section", "values", "line", "message"),
    [
        ("model", {"hidden_size": 64}, 4, "model.hidden_size = 32 there, and 64 in this job"),
        ("model", {"num_hidden_layers": 3}, 4, "model.num_hidden_layers = 2 there, and 3 in"),
        ("model", {"vocab_size": 300}, 4, "model.vocab_size = 258 there, and 300 in this job"),
        ("model", {"intermediate_size": 96}, 4, "model.intermediate_size = 64 there, and 96"),
        ("model", {"tie_word_embeddings": True}, 4, "exp_avg.lm_head.weight is of shape"),
        ("model", {"model_type": "qwen2"}, 4, "self_attn.k_proj.bias is missing there, and of"),
        ("job", {"seed": 1}, 4, "it was trained with job.seed = 0, and this job has 1"),
        ("batch", {"tokens": 128}, 4, "batch.tokens = 64, and this job has 128"),
        ("batch", {"microbatches": 3}, 4, "batch.microbatches = 4, and this job has 6"),
        ("job", {"steps": 2}, 2, "it is of step 3, and job.steps = 2; nearest valid: job.steps"),
    ],
)
def test_what_differs_from_the_newest_version_is_named(
    tmp_path: Path, section: str, values: dict[str, object], line: int, message: str
):
    """Model, data and steps: one sentence with version, file and line; none is gone back to."""
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, changed(JOB, section, **values))
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / 'job.toml'}:{line}: version {tmp_path / 'versions'}/step-")
    assert f"{STEP:08}-" in said
    assert "damaged" not in said
    assert message in said
