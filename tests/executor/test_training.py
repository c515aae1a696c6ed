"""Training as the interpreter's work, driven straight on: against training in one process."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from cases import assert_same_bits
from exchange import run_ranks
from msgspec.structs import replace
from parity_bounds import SEED, batches_of, bound_of, distance, job_of, same_order
from parity_cases import GLOBAL_BATCH, NUM_STEPS, Phase, by_hand, healthy
from straight import run_straight
from torch import Tensor

from resihp.config import Numerics
from resihp.errors import CommError
from resihp.executor.device.interface import Communicator
from resihp.executor.layouts import slice_of
from resihp.executor.models import build_model
from resihp.executor.state import TrainState, initial_holding
from resihp.executor.training import TrainingWork
from resihp.ir.expand import expand
from resihp.ir.model import Plan, Precision
from resihp.ir.program import Program
from resihp.wire.messages import StepRecord

ALONE = healthy(1, 1, 1, "1f1b")[0].plan


class Job:
    """One training run over a plan of the parity grid, all ranks in this process."""

    def __init__(
        self,
        plan: Plan,
        model: str = "untied",
        numerics: Numerics = "bitwise",
        precision: Precision = "fp32",
    ) -> None:
        self.plan = replace(plan, precision=precision)
        self.job = job_of(model, plan.mesh, numerics, precision)
        self.model = build_model(self.job.model)
        self.states: dict[int, TrainState] = {}

    def work(self, program: Program, groups: Mapping[str, Communicator]) -> TrainingWork:
        state = TrainState(self.job)
        holding = initial_holding(self.model, self.job, program)
        state.prepare(1, holding)
        state.go()
        self.states[program.rank] = state
        return TrainingWork(
            self.model,
            self.plan,
            holding,
            state,
            batches_of(self.plan.mesh.dp),
            groups,
            numerics=self.job.compute.numerics,
        )

    def run(self, num_steps: int = NUM_STEPS) -> list[StepRecord]:
        """What all ranks say happened, which must be the same."""
        records = run_straight(self.model, self.plan, self.work, range(num_steps))
        first, *others = [[_timeless(r) for r in of_rank] for of_rank in records.values()]
        assert all(other == first for other in others)
        return first

    def parameters(self) -> dict[str, Tensor]:
        """The logical ones, put together; every holder of an element must have the same bits."""
        whole: dict[str, Tensor] = {}
        for state in self.states.values():
            assert state.current is not None
            program, num_chunks = state.current.program, self.plan.mesh.tp
            for name, shard in state.current.parameters.items():
                layout = self.model.layout(name)
                if name not in whole:
                    whole[name] = torch.full(layout.shape, float("nan"))
                for chunk in range(num_chunks):
                    if layout.dim is not None and chunk * program.tp // num_chunks != (
                        program.tp_index
                    ):
                        continue
                    where = program.tp, program.tp_index
                    mine = slice_of(layout, shard, chunk, num_chunks, *where)
                    known = slice_of(layout, whole[name], chunk, num_chunks)
                    assert known.isnan().all() or torch.equal(known, mine), name
                    known.copy_(mine)
        return whole


def _timeless(record: StepRecord) -> StepRecord:
    return replace(record, duration_s=0.0)


@pytest.mark.parametrize(
    "phases",
    [
        healthy(1, 2, 2, "zb-h1"),
        healthy(1, 2, 1, "zbv"),
        by_hand([[1, 1], [1, 1]], kind="1f1b", num_moved=2),
    ],
    ids=["dp", "v", "migrated"],
)
def test_without_tensor_parallelism_the_bits_are_those_of_one_process(phases: list[Phase]):
    """Loss and every parameter after ten steps, with tied tables on one rank or on two."""
    job = Job(phases[0].plan, "tied")
    records = job.run()
    expected = same_order("tied", phases[0].plan.mesh.dp)
    assert [record.loss for record in records] == expected.losses
    assert [record.grad_norm for record in records] == pytest.approx(expected.grad_norms, rel=1e-12)
    assert_same_bits(job.parameters(), expected.parameters)


@pytest.mark.parametrize(
    ("phases", "numerics"),
    [
        (by_hand([[2, 4], [4, 1]], kind="1f1b"), "bitwise"),
        (by_hand([[2, 4], [4, 1]], kind="1f1b"), "fast"),
    ],
    ids=["2-4+4-1", "2-4+4-1 fast"],
)
def test_any_layout_trains_as_one_process_does(phases: list[Phase], numerics: Numerics):
    """Within what single precision allows, with copies of KV heads and a tied vocabulary."""
    job, bound = Job(phases[0].plan, "tied", numerics), bound_of("tied")
    records = job.run()
    for record, loss in zip(records, bound.exact.losses, strict=True):
        assert abs(record.loss - loss) <= bound.loss
    for record, norm in zip(records, bound.exact.grad_norms, strict=True):
        assert record.grad_norm == pytest.approx(norm, rel=1e-5)
    parameters = job.parameters()
    for name, tensor in parameters.items():
        assert distance(tensor, bound.exact.parameters[name]) <= bound.parameters[name], name
    assert torch.equal(parameters["lm_head.weight"], parameters["model.embed_tokens.weight"])


def test_bf16_trains_almost_as_exact_numbers_do():
    """Stages compute in bf16, sums and updates are fp32: ten steps go nearly the same way."""
    job = Job(by_hand([[2, 1]], kind="zb-h1")[0].plan, "tied", "fast", "bf16")
    exact = bound_of("tied").exact
    assert [record.loss for record in job.run()] == pytest.approx(exact.losses, rel=2e-3)
    way = off = 0.0
    for name, tensor in job.parameters().items():
        assert tensor.dtype == torch.float32
        right = exact.parameters[name]
        way += float((right - job.model.initial(name, SEED)).square().sum())
        off += float((right - tensor).square().sum())
    assert off**0.5 < 0.05 * way**0.5


def test_every_sample_is_in_the_record():
    """In order of micro-batch, whoever ran it; with the number of tokens."""
    job = Job(by_hand([[1, 1], [1, 1]], kind="zb-h1", num_moved=3)[0].plan)
    batches = batches_of(2)
    for step, record in enumerate(job.run(2)):
        keys = [(home, number) for home in (0, 1) for number in range(GLOBAL_BATCH // 2)]
        assert record.samples == tuple(batches.sample_id(step, *key) for key in keys)
        assert record.step == step
        assert record.num_tokens == 32 * GLOBAL_BATCH


def test_all_ranks_skip_a_step_with_a_gradient_that_is_not_finite():
    """One bad number in one micro-batch's gradient; parameters stay, and the next step is done."""
    job = Job(healthy(2, 2, 1, "1f1b")[0].plan)
    works: dict[int, TrainingWork] = {}

    def spoiled(program: Program, groups: Mapping[str, Communicator]) -> TrainingWork:
        work = works[program.rank] = job.work(program, groups)
        if program.rank == 1:
            forward = work.forward

            def once(stage: int, key: tuple[int, int], x: Tensor | None) -> Tensor | None:
                result = forward(stage, key, x)
                if key == (0, 3) and job.states[1].version == 0 and result is not None:
                    result[0, 0] = float("inf")
                return result

            work.forward = once  # type: ignore[method-assign]
        return work

    records = run_straight(job.model, job.plan, spoiled, range(2))
    assert {tuple(r.skipped for r in of_rank) for of_rank in records.values()} == {(True, False)}
    assert {(state.version, state.updates) for state in job.states.values()} == {(2, 1)}


def test_an_aborted_iteration_leaves_nothing_behind():
    """Its sums, losses and graphs are dropped; the iteration is run anew with the same bits."""
    job, clean = Job(ALONE, "tied"), Job(ALONE, "tied")
    program = expand(ALONE, 0)

    def aborted(rank: int, groups: Mapping[str, Communicator]) -> TrainingWork:
        work = job.work(program, groups)
        work.begin(0)
        for number in (0, 1):
            work.forward(0, (0, number), None)
        work.backward_input(0, (0, 0), None)
        work.backward_weight(0, (0, 0))
        work.discard()
        return work

    (work,) = run_ranks(job.model, ALONE, aborted).values()
    again = run_straight(job.model, ALONE, lambda *_: work, range(2))
    assert [_timeless(record) for record in again[0]] == clean.run(2)
    assert_same_bits(job.parameters(), clean.parameters())


def test_a_message_of_a_wrong_size_is_refused():
    """Rather than read as something else."""
    job = Job(ALONE)

    def arrive(rank: int, groups: Mapping[str, Communicator]) -> None:
        work = job.work(expand(ALONE, rank), groups)
        work.arrived(bytearray(4 * 32 * 32), 1)
        work.arrived(bytearray(4 * 32 * 32 // 2), 2)
        with pytest.raises(CommError, match="bytes do not make"):
            work.arrived(bytearray(4 * 32 * 32 - 4), 1)

    run_ranks(job.model, ALONE, arrive)
