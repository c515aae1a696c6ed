"""Plans for the coordinator: compiled, printed, read back and verified before anyone sees them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from resihp.compiler import adapt, facts_of, initial_plan
from resihp.config import JobConfig
from resihp.errors import PlanRejected
from resihp.ir.diagnostics import Severity
from resihp.ir.model import Plan
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.verify import verify
from resihp.monitor.given_plan import given_plan
from resihp.wire.backend import EXECUTOR_TRANSPORT

__all__ = ["Planner", "VerifiedPlan"]


class VerifiedPlan(msgspec.Struct, frozen=True):
    """A plan and the text that was verified; only `Planner` makes these."""

    text: str
    plan: Plan


class Planner:
    """Makes the plans of one job."""

    def __init__(self, job: JobConfig) -> None:
        self._job = job

    def initial(self) -> VerifiedPlan:
        """The healthy plan: the one that the job file names, or one for its degrees.

        Raises NoFeasiblePlan where the model does not fit the devices, and UserError for a file
        that is no plan of this job.
        """
        job = self._job
        if job.parallel.plan is not None:
            return self._verified(given_plan(job, job.parallel.plan), previous=None)
        return self._verified(
            initial_plan(
                job.model.shape(job.job.name),
                job.parallel.mesh(),
                job.batch.batch(),
                schedule=job.parallel.schedule,
                memory_bytes=job.device.memory_bytes,
            ),
            previous=None,
        )

    def after_loss(self, previous: VerifiedPlan, lost: Iterable[int], step: int) -> VerifiedPlan:
        """The plan that redoes iteration `step` without `lost`. NoFeasiblePlan where none can."""
        return self._verified(adapt(previous.plan, lost, step), previous=previous.plan)

    def _verified(self, plan: Plan, previous: Plan | None) -> VerifiedPlan:
        text = print_plan(plan)
        parsed = parse(text)
        findings = verify(
            parsed,
            previous=previous,
            facts=facts_of(parsed.plan),
            transport=EXECUTOR_TRANSPORT,
        )
        errors = [finding for finding in findings if finding.severity is Severity.ERROR]
        if errors:
            raise PlanRejected(f"the verifier refused the plan: {errors[0].message}", errors)
        return VerifiedPlan(text, parsed.plan)
