"""Whether a program that arrived can run here: on this rank, in this job, with these peers.

The coordinator has proved the whole plan. This looks at one program with what the rank itself
knows, so that a program of another job, rank or generation stops before anything is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from resihp.config import JobConfig
from resihp.errors import FrameError
from resihp.executor.interpreter.flow import undelivered
from resihp.ir.model import Op
from resihp.ir.program import Program, ProgramInstr, boundary_type

__all__ = ["check_program"]

_Work = tuple[int, int, int]
"""Stage, home replica, micro-batch."""


def check_program(program: Program, job: JobConfig, rank: int, peers: Collection[int]) -> None:
    """FrameError, with the first reason, where `program` cannot run on `rank` of `job`.

    `peers` are all ranks of the generation, this one among them.
    """
    for reasons in (_of_the_job(program, job, rank), _of_instructions(program, rank, peers)):
        reason = next(reasons, None)
        if reason is not None:
            raise FrameError(f"the program that came to rank {rank} does not run here: {reason}")


def _of_the_job(program: Program, job: JobConfig, rank: int) -> Iterator[str]:
    if program.rank != rank:
        yield f"it is that of rank {program.rank}"
    model = job.model.shape(program.model.name)
    if program.model != model:
        yield f"its model is {program.model}, the job's is {model}"
    if program.mesh != job.parallel.mesh():
        yield f"its mesh is {program.mesh}, the job's is {job.parallel.mesh()}"
    if program.batch != job.batch.batch():
        yield f"its batch is {program.batch}, the job's is {job.batch.batch()}"
    if program.precision != job.compute.precision:
        yield f"it is in {program.precision}, the job in {job.compute.precision}"
    if not 0 <= program.tp_index < program.tp:
        yield f"member {program.tp_index} of {program.tp}"
    yield from _of_stages(program)


def _of_stages(program: Program) -> Iterator[str]:
    stages, ends = program.stages, [-1]
    if len(stages) != len(program.layers) or not stages:
        yield f"{len(stages)} stages with {len(program.layers)} ranges of layers"
    if sorted(set(stages)) != list(stages) or not 0 <= stages[0] <= stages[-1] < program.num_stages:
        yield f"stages {list(stages)} of {program.num_stages}"
    for first, last in program.layers:
        if not ends[-1] < first <= last < program.model.layers:
            yield f"layers {first}..{last} of {program.model.layers}, after layer {ends[-1]}"
        ends.append(last)


def _of_instructions(program: Program, rank: int, peers: Collection[int]) -> Iterator[str]:
    for index, instr in enumerate(program.instrs):
        for reason in _of_instruction(program, index, instr, peers):
            yield f"instruction {index} ({instr.op.mnemonic}) {reason}"
        if any(transfer.peer == rank for transfer in instr.transfers):
            yield f"instruction {index} ({instr.op.mnemonic}) is with this rank itself"
    index = undelivered(program)
    if index is not None:
        yield f"nothing delivers what instruction {index} uses"
    yield from _of_order(program)


def _of_instruction(
    program: Program, index: int, instr: ProgramInstr, peers: Collection[int]
) -> Iterator[str]:
    if instr.op.has_stage and instr.stage not in program.stages:
        yield f"is of stage {instr.stage}, which is not here"
    if instr.op.has_micro_batch:
        batch, mesh = program.batch, program.mesh
        if instr.microbatch is None or not 0 <= instr.microbatch < batch.microbatches:
            yield f"is of micro-batch {instr.microbatch} of {batch.microbatches}"
        if instr.home is None or not 0 <= instr.home < mesh.dp:
            yield f"is of replica {instr.home} of {mesh.dp}"
    if instr.paired and index + 1 == len(program.instrs):
        yield "is paired with nothing"
    if not 1 <= instr.num_chunks <= program.batch.tokens:
        yield f"is in {instr.num_chunks} chunks"
    elif instr.op.is_transfer:
        yield from _of_transfer(program, instr, peers)


def _of_transfer(program: Program, instr: ProgramInstr, peers: Collection[int]) -> Iterator[str]:
    whole = boundary_type(program, instr.num_chunks)
    if instr.tensor != whole:
        yield f"is of {instr.tensor}, not {whole}"
    if instr.num_chunks == 1 and len(instr.transfers) != 1:
        yield f"has {len(instr.transfers)} messages for one tensor"
    for peer, chunk, num_chunks in instr.transfers:
        if peer not in peers:
            yield f"is with rank {peer}, which is not of this generation"
        if num_chunks != instr.num_chunks or not 0 <= chunk < num_chunks:
            yield f"has chunk {chunk} of {num_chunks}, in {instr.num_chunks} chunks"


def _of_order(program: Program) -> Iterator[str]:
    """F, B and W of each micro-batch once, in this order; then reductions; the step at the end."""
    done: dict[Op, set[_Work]] = {Op.F: set(), Op.B: set(), Op.W: set()}
    reduced = set[int]()
    for index, instr in enumerate(program.instrs):
        stage = -1 if instr.stage is None else instr.stage
        if instr.op is Op.REDUCE_GRADS:
            reduced.add(stage)
        elif instr.op.is_compute:
            work = stage, instr.home or 0, instr.microbatch or 0
            for part in (Op.B, Op.W) if instr.op is Op.BW else (instr.op,):
                before = {Op.F: None, Op.B: Op.F, Op.W: Op.B}[part]
                if work in done[part] or (before is not None and work not in done[before]):
                    yield f"instruction {index}: {part.mnemonic} of {work} out of order"
                done[part].add(work)
            if instr.op is not Op.F and stage in reduced:
                yield f"instruction {index} comes after the reduction of stage {stage}"
    if done[Op.F] != done[Op.W]:
        yield "micro-batches without a weight gradient"
    if reduced != set(program.stages):
        yield f"stages {sorted(reduced)} are reduced, not {list(program.stages)}"
    if [i.op for i in program.instrs].count(Op.STEP) != 1 or program.instrs[-1].op is not Op.STEP:
        yield "it does not end with its only step"
