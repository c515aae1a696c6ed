"""A plan that the user wrote, as the one to begin with."""

from __future__ import annotations

from pathlib import Path

import msgspec

from resihp.compiler.lower import lower
from resihp.config import JobConfig
from resihp.errors import ConfigError, PlanSyntaxError
from resihp.ir.model import Group, Level, Plan
from resihp.ir.parser import parse
from resihp.ir.runnable import check_runnable
from resihp.ir.torch_csv import read_torch_csv

__all__ = ["given_plan"]


def given_plan(job: JobConfig, path: str) -> Plan:
    """The plan in the file `path`, with the capacity of the job's devices.

    A file called `*.csv` is a schedule of torch's pipelining: the same in each replica, for the
    model, batch and degrees of the job.

    It is not verified here. Raises ConfigError, naming the key, for a file that cannot be read,
    is no plan, is none of this job, or asks for what the executor cannot do.
    """
    here = f'parallel.plan = "{path}"'
    try:
        text = Path(path).read_text(encoding="utf-8")
        plan = (
            _torch_plan(here, text, path, job)
            if path.endswith(".csv")
            else parse(text, path=path).plan
        )
    except OSError as error:
        raise ConfigError(f"{here}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{here}: not UTF-8 text") from None
    except PlanSyntaxError as error:
        raise ConfigError(f"{here}: {error}; `resihp verify {path}` shows where") from None
    _check_same(here, plan, job)
    check_runnable(plan)
    return msgspec.structs.replace(plan, memory_bytes=job.device.memory_bytes)


def _torch_plan(here: str, text: str, path: str, job: JobConfig) -> Plan:
    """One replica of TP degree 1 becomes all of the job's. ConfigError for another pipeline."""
    mesh = job.parallel.mesh()
    one = read_torch_csv(
        text, path=path, tokens=job.batch.tokens, model=job.model.shape("csv")
    ).plan
    for key, said, wanted in (
        ("rows", one.mesh.pp, ("parallel.pp", mesh.pp)),
        ("micro-batches", one.batch.microbatches, ("batch.microbatches", job.batch.microbatches)),
    ):
        if said != wanted[1]:
            raise ConfigError(
                f"{here}: it has {said} {key}, the job file {wanted[0]} = {wanted[1]}; "
                f"nearest valid: {said}"
            )
    groups = tuple(
        Group(
            replica=replica,
            pp=group.pp,
            ranks=tuple((replica * mesh.pp + group.pp) * mesh.tp + i for i in range(mesh.tp)),
            layers=group.layers,
        )
        for replica in range(mesh.dp)
        for group in one.groups
    )
    everywhere = tuple(range(mesh.dp))
    plan = msgspec.structs.replace(
        one,
        mesh=mesh,
        groups=groups,
        streams=tuple(msgspec.structs.replace(s, replicas=everywhere) for s in one.streams),
        precision=job.compute.precision,
    )
    return plan if plan.level is Level.PLAN else lower(plan)


def _check_same(here: str, plan: Plan, job: JobConfig) -> None:
    """Whether the plan is for this model, mesh and batch, and for the start of a job."""
    shape = job.model.shape(plan.model.name)
    wanted = {"model": shape, "mesh": job.parallel.mesh(), "batch": job.batch.batch()}
    for name, struct in wanted.items():
        said: dict[str, object] = msgspec.structs.asdict(getattr(plan, name))
        for key, value in msgspec.structs.asdict(struct).items():
            if said[key] != value:
                raise ConfigError(
                    f"{here}: its {name} line says {key}={said[key]}, the job file {key}={value}"
                )
    if plan.precision != job.compute.precision:
        raise ConfigError(
            f"{here}: the plan is for precision {plan.precision}, the job file for "
            f'compute.precision = "{job.compute.precision}"'
        )
    if plan.resume is not None or plan.lost or plan.reconfigure:
        raise ConfigError(
            f"{here}: this plan goes on from another one; a job begins with a whole one"
        )
