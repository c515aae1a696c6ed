"""A plan that the user wrote, as the one to begin with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from resihp.compiler.facts import facts_of
from resihp.compiler.lower import lower
from resihp.config import JobConfig
from resihp.errors import ConfigError, PlanRejected, PlanSyntaxError, UserError
from resihp.ir.diagnostics import Diagnostic, Severity
from resihp.ir.model import Group, Level, Plan
from resihp.ir.parser import parse
from resihp.ir.placement import placement_of
from resihp.ir.runnable import check_runnable
from resihp.ir.source import Parsed
from resihp.ir.statements import spell_numbers
from resihp.ir.torch_csv import read_torch_csv
from resihp.ir.verify import verify
from resihp.wire.backend import EXECUTOR_TRANSPORT

__all__ = ["given_plan", "refusal"]


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
        raise _wrong(f"{here}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise _wrong(f"{here}: not UTF-8 text") from None
    except PlanSyntaxError as error:
        raise _wrong(f"{here}: {error}; `resihp verify {path}` shows where") from None
    _check_same(here, plan, job)
    try:
        check_runnable(plan)
    except UserError as error:
        raise _wrong(f"{here}: {error}") from None
    return msgspec.structs.replace(plan, memory_bytes=job.device.memory_bytes)


def refusal(path: str, plan: Plan, found: Sequence[Diagnostic]) -> PlanRejected:
    """What is said where the verifier found errors in `plan`, which is that of the file `path`.

    The place is that in the file, as far as its text says it: a schedule of torch's does not, and
    the capacity of the devices is the job's.
    """
    first, where, shows = found[0], path, f"`resihp verify {path}` shows where"
    if not path.endswith(".csv"):
        written = parse(Path(path).read_text(encoding="utf-8"), path=path)
        alone = {finding.code for finding in _errors(written)}
        first = next(_errors(msgspec.structs.replace(written, plan=plan)), first)
        where = f"{path}:{first.span.line}"
        if first.code not in alone:
            shows = "the capacity is device.memory of the job file"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return PlanRejected(
        f'parallel.plan = "{path}": the verifier refused the plan: {where}: {first.code}: '
        f"{first.message}{more}; {shows}",
        found,
        key="parallel.plan",
    )


def _errors(parsed: Parsed) -> Iterator[Diagnostic]:
    findings = verify(parsed, facts=facts_of(parsed.plan), transport=EXECUTOR_TRANSPORT)
    return (finding for finding in findings if finding.severity is Severity.ERROR)


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, key="parallel.plan")


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
            raise _wrong(
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
        recompute=tuple(range(placement_of(one).num_stages)) if job.compute.recompute else (),
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
                raise _wrong(
                    f"{here}: its {name} line says {key}={said[key]}, the job file {key}={value}"
                )
    if plan.precision != job.compute.precision:
        raise _wrong(
            f"{here}: the plan is for precision {plan.precision}, the job file for "
            f'compute.precision = "{job.compute.precision}"'
        )
    if job.compute.recompute and not plan.recompute:
        stages = spell_numbers(tuple(range(placement_of(plan).num_stages)))
        raise _wrong(
            f"{here}: compute.recompute = true, and the plan has no recompute line, which names "
            f"the stages that do; write `recompute {stages}` into it, or leave compute.recompute "
            "out"
        )
    if plan.resume is not None or plan.lost or plan.reconfigure:
        raise _wrong(f"{here}: this plan goes on from another one; a job begins with a whole one")
