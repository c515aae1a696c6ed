"""Plans for the coordinator: compiled, printed, read back and verified before anyone sees them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from resihp.compiler.adaptation import (
    ANYTHING,
    Patience,
    Profile,
    Situation,
    Trust,
    adapt,
    grow_back,
    redone,
)
from resihp.compiler.adaptation.decision import Decision
from resihp.compiler.cluster import CLUSTERS, Cluster, Health, find_cluster
from resihp.compiler.costs import CostModel
from resihp.compiler.facts import facts_of
from resihp.compiler.lane_times import lane_seconds
from resihp.compiler.layout import initial_plan
from resihp.compiler.models import Model
from resihp.compiler.pricing import Pricing
from resihp.compiler.reconfigure import read_all
from resihp.compiler.simulate import simulate
from resihp.compiler.sources import Stored
from resihp.config import JobConfig
from resihp.errors import ConfigError, NoFeasiblePlan, PlanRejected, UserError
from resihp.ir.diagnostics import Severity
from resihp.ir.kept import num_kept, without
from resihp.ir.model import LayerRange, MicroBatch, Plan, Resume
from resihp.ir.parser import parse
from resihp.ir.printer import print_plan
from resihp.ir.reshard import nothing_before
from resihp.ir.verify import verify
from resihp.monitor.given_plan import given_plan, refusal
from resihp.monitor.keeping import choose_kept
from resihp.wire.backend import EXECUTOR_TRANSPORT
from resihp.wire.messages import Emulation, KeptSums, Settled

__all__ = ["Grown", "Planner", "VerifiedPlan"]

_BUDGET = 4_000
"""Of `adapt`: everybody waits for this plan, so it is searched for in some 10 ms, not longer."""


SAME_LAYERS = Profile(repartitions=False)
"""What the end of an iteration is planned under that is to keep a part of itself."""
WAIT_S = 1.0
"""About what a partition costs that comes later: one more generation opens."""


class VerifiedPlan(msgspec.Struct, frozen=True):
    """A plan and the text that was verified: by `Planner`, or for an entry that was decided on."""

    text: str
    plan: Plan
    decision: dict[str, object] | None = None
    """Why it is this one: what was considered, with predicted times. None for the first plan."""
    emulated: Emulation | None = None
    """How long everything takes, where the devices are emulated."""
    kept: tuple[KeptSums, ...] = ()
    """Where the gradients lie that the `resume` line keeps."""
    steady: VerifiedPlan | None = None
    """What the same groups run after the iteration that this plan redoes; None: this plan."""
    waits_for_boundary: bool = False
    """Another partition of the layers is better; it waits until the iteration is redone."""

    @property
    def lasting(self) -> VerifiedPlan:
        """What runs in the end."""
        return self if self.steady is None else self.steady

    def at(self, step: int) -> VerifiedPlan:
        """What runs in iteration `step`."""
        resume = self.plan.resume
        return self if resume is not None and resume.step == step else self.lasting


class Grown(msgspec.Struct, frozen=True):
    """Whether a plan counts on ranks that are back."""

    plan: VerifiedPlan | None
    """None: it does not."""
    why: str


class Planner:
    """Makes the plans of one job."""

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        self._shape = job.model.shape(job.job.name)
        self._cluster = _cluster_of(job)
        self._costs = CostModel.of_description(
            Model(shape=self._shape),
            self._cluster,
            precision=job.compute.precision,
            max_tp=job.parallel.tp,
        )

    def initial(self) -> VerifiedPlan:
        """The healthy plan: the one that the job file names, or one for its degrees.

        Raises NoFeasiblePlan where the model does not fit the devices, and UserError for a file
        that is no plan of this job, or a plan that the executor does not run.
        """
        job = self._job
        if job.parallel.plan is not None:
            chosen = given_plan(job, job.parallel.plan)
            try:
                given = self._verified(chosen, previous=None)
            except PlanRejected as error:
                raise refusal(job.parallel.plan, chosen, error.diagnostics) from None
            return self._timed(given, self._pricing(Health()))
        plan = initial_plan(
            self._shape,
            job.parallel.mesh(),
            job.batch.batch(),
            schedule=job.parallel.schedule,
            num_chunks=job.parallel.stages_per_rank,
            memory_bytes=job.device.memory_bytes,
            precision=job.compute.precision,
            recomputes=job.compute.recompute,
            pricing=self._pricing(Health()),
        )
        return self._timed(self._verified(plan, previous=None), self._pricing(Health()))

    def after_loss(
        self,
        previous: VerifiedPlan,
        lost: Iterable[int],
        step: int,
        *,
        snapshots: Mapping[int, tuple[int, ...]] | None = None,
        settled: Mapping[int, Settled] | None = None,
        step_s: float = 0.0,
    ) -> VerifiedPlan:
        """The plan that redoes iteration `step` without `lost`. NoFeasiblePlan where none can.

        What no live rank holds comes from `snapshots` of version `step`, by lost rank the live
        ones that can read it. What live ranks have `settled` with of the iteration is kept as far
        as it can be; then the plan has a steady one.
        With other layers nothing can be kept: a new partition waits for the end of the iteration
        where that costs less than what is kept is worth, an iteration taking `step_s`.
        """
        lost = tuple(lost)
        lasting = previous.lasting.plan
        stored = Stored(snapshots=snapshots or {})
        plan = self._adapted(lasting, lost, step, stored)
        if not settled:
            return plan
        ran = previous.at(step).plan
        kept = self._keeping(ran, plan, lost, step, settled)
        if kept.kept or step_s < WAIT_S or _layers_of(plan.plan) == _layers_of(ran):
            return kept
        try:
            same = self._adapted(lasting, lost, step, stored, SAME_LAYERS)
        except NoFeasiblePlan:
            return plan
        kept = self._keeping(ran, same, lost, step, settled)
        worth_s = step_s * num_kept(kept.plan) / (ran.mesh.dp * ran.batch.microbatches)
        if worth_s < WAIT_S:
            return plan
        return msgspec.structs.replace(kept, waits_for_boundary=True)

    def from_checkpoint(
        self, previous: VerifiedPlan, lost: Iterable[int], step: int
    ) -> VerifiedPlan:
        """The plan that begins with iteration `step` without `lost`, with all state of version
        `step` read from its checkpoint: no rank keeps what it holds. NoFeasiblePlan as above.

        Since nothing ties a rank to its stage then, the ranks that are left may also change places.
        """
        stored = Stored(has_checkpoint=True, is_only_saved=True)
        lost = tuple(lost)
        try:
            return self._adapted(previous.lasting.plan, lost, step, stored)
        except NoFeasiblePlan:
            return self._adapted(_reseated(self.initial().plan, lost), lost, step, stored)

    def loading(self, plan: VerifiedPlan, step: int) -> VerifiedPlan:
        """The layout and streams of `plan`, begun with all state from the checkpoint of `step`."""
        lasting = plan.lasting.plan
        lines = read_all(lasting.groups, step)
        whole = msgspec.structs.replace(
            lasting, resume=Resume(step=step), reconfigure=lines, returned=()
        )
        return self._verified(whole, previous=nothing_before(whole))

    def _keeping(
        self,
        ran: Plan,
        plan: VerifiedPlan,
        lost: Collection[int],
        step: int,
        settled: Mapping[int, Settled],
    ) -> VerifiedPlan:
        """`plan` as it redoes iteration `step` of `ran` without what is kept, then as it is.

        Emulated devices compute nothing, so that nothing is kept there.
        """
        choice = choose_kept(ran, plan.plan, step, settled)
        if not choice.micro_batches:
            return plan
        resumed = self._redone(plan.plan, lost, choice.micro_batches, step)
        steady = msgspec.structs.replace(plan.plan, resume=None, reconfigure=(), returned=())
        return msgspec.structs.replace(
            self._verified(resumed, previous=ran),
            decision=plan.decision,
            kept=choice.sums,
            steady=self._verified(steady, previous=resumed),
        )

    def _redone(
        self, plan: Plan, lost: Collection[int], keep: Collection[MicroBatch], step: int
    ) -> Plan:
        """What is left is shared out anew where that is faster.

        Not on GPUs, where each pair of ranks that exchange tensors costs a stream.
        """
        if self._job.device.kind != "cpu":
            return without(plan, keep, step)
        return redone(plan, self._pricing(Health(lost=frozenset(lost))), keep, step)

    def _adapted(
        self,
        previous: Plan,
        lost: Iterable[int],
        step: int,
        stored: Stored,
        profile: Profile = ANYTHING,
        returned: Collection[int] = (),
    ) -> VerifiedPlan:
        pricing = self._pricing(Health(lost=frozenset(lost).difference(returned)))
        situation = Situation(
            previous, pricing, profile, resume_step=step, returned=returned, stored=stored
        )
        decision = adapt(situation, budget=_BUDGET)
        return self._decided(decision, situation.held, pricing)

    def with_returned(
        self,
        previous: VerifiedPlan,
        lost: Iterable[int],
        returned: Collection[int],
        step: int,
        *,
        snapshots: Mapping[int, tuple[int, ...]] | None = None,
    ) -> VerifiedPlan:
        """The plan that redoes iteration `step` where none is feasible with the members alone.

        `returned` are some of `lost` that are back, and lost in `previous` too: they hold nothing.
        The rest is as in `after_loss`.
        """
        stored = Stored(snapshots=snapshots or {})
        return self._adapted(previous.lasting.plan, lost, step, stored, returned=returned)

    def after_return(
        self,
        previous: VerifiedPlan,
        lost: Iterable[int],
        returned: Collection[int],
        *,
        trust: Trust,
        patience: Patience,
        iteration: int,
        left: int,
        switch_steps: float,
    ) -> Grown:
        """Whether to count on `returned`, some of `lost`, after `iteration` of `previous`.

        `left` iterations are yet to come; to switch takes as long as `switch_steps` of the present
        ones, without the state that moves. NoFeasiblePlan as for a loss.
        """
        pricing = self._pricing(Health(lost=frozenset(lost).difference(returned)))
        lasting = previous.lasting.plan
        now_s = simulate(lasting, pricing).iteration_s
        patience = msgspec.structs.replace(
            patience,
            horizon_iterations=min(patience.horizon_iterations, left),
            switch_s=switch_steps * now_s,  # of the predicted time, as all that it is compared to
        )
        growth = grow_back(
            lasting,
            pricing,
            returned,
            trust=trust,
            patience=patience,
            iteration=iteration,
            budget=_BUDGET,
        )
        if growth.decision is None:
            return Grown(None, growth.verdict.reason)
        plan = self._decided(growth.decision, lasting, pricing)
        return Grown(plan, growth.verdict.reason)

    def _decided(self, decision: Decision, previous: Plan, pricing: Pricing) -> VerifiedPlan:
        """The plan of a decision, verified after `previous`, with its times and reasons."""
        verified = self._verified(decision.plan, previous=previous)
        verified = self._timed(verified, pricing, decision.moved_s, decision.moved_bytes)
        record = decision.record()
        del record["text"]  # the plan is stored on its own
        return msgspec.structs.replace(verified, decision=record)

    def _pricing(self, health: Health) -> Pricing:
        return Pricing(self._shape, self._costs, self._cluster, health)

    def _timed(
        self, plan: VerifiedPlan, pricing: Pricing, move_s: float = 0.0, moved_bytes: int = 0
    ) -> VerifiedPlan:
        """With its times, where the devices are emulated."""
        if self._job.device.kind != "emulated":
            return plan
        seconds = lane_seconds(plan.plan, pricing)
        emulated = Emulation(
            seconds={str(name): tuple(each) for name, each in seconds.items()},
            move_s=move_s,
            moved_bytes=moved_bytes,
        )
        return msgspec.structs.replace(plan, emulated=emulated)

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


def _reseated(plan: Plan, lost: Collection[int]) -> Plan:
    """`plan`, of all ranks, with those that are not lost in its first replicas.

    Of a replica for which they do not suffice each stage gets equally many, as far as they do.
    """
    alive = [rank for rank in plan.active_ranks if rank not in lost]
    rest = [rank for rank in plan.active_ranks if rank in lost]
    seats: dict[tuple[int, int], list[int]] = {}
    for replica in sorted({group.replica for group in plan.groups}):
        groups = [group for group in plan.groups if group.replica == replica]
        for index in range(max(group.tp for group in groups)):
            for group in groups:
                if index < group.tp:
                    taken = alive if alive else rest
                    seats.setdefault((group.replica, group.pp), []).append(taken.pop(0))
    return msgspec.structs.replace(
        plan,
        groups=tuple(
            msgspec.structs.replace(group, ranks=tuple(seats[group.replica, group.pp]))
            for group in plan.groups
        ),
    )


def _layers_of(plan: Plan) -> dict[int, tuple[LayerRange, ...]]:
    """Of each position of the pipeline."""
    return {group.pp: group.layers for group in plan.groups}


def _cluster_of(job: JobConfig) -> Cluster:
    """The cluster that is emulated; else this machine as one node of equal workers.

    Plans are compared by ratios of times, and those follow from the model, not from how fast the
    machine is.
    """
    world = job.parallel.world
    if job.device.cluster is not None:
        try:
            cluster = find_cluster(job.device.cluster)
        except UserError as error:
            raise ConfigError(f"device.cluster: {error}", key="device.cluster") from None
        if cluster.num_devices < world:
            raise ConfigError(
                f'device.cluster = "{job.device.cluster}": it has {cluster.num_devices} devices '
                f"and the job needs {world}",
                key="device.cluster",
            )
        return cluster
    box = CLUSTERS["cpu-box"]
    return msgspec.structs.replace(
        box, cluster=msgspec.structs.replace(box.cluster, gpus_per_node=world)
    )
