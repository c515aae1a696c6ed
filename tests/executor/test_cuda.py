"""What needs a GPU: streams, NCCL, and a pipeline that gives what the CPU gives."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from msgspec.structs import replace

from resihp.compiler import initial_plan
from resihp.config import Numerics, loads
from resihp.errors import CommError, ConfigError
from resihp.executor.data import load_dataset
from resihp.executor.device.cuda import CudaDevice, CudaQueue, give_streams_connections
from resihp.executor.device.edges import MAX_EDGES
from resihp.executor.device.issuing import IssuingStream
from resihp.executor.device.local import run_local
from resihp.executor.device.nccl import NcclCommunicator, abort_all, new_unique_id
from resihp.executor.interpreter.observe import Observation
from resihp.executor.models import build_model
from resihp.executor.packing import Packing
from resihp.executor.sampler import GlobalBatches, Sampler
from resihp.executor.state import TrainState, initial_holding
from resihp.executor.training import TrainingWork

GPU = torch.device("cuda", 0)
NUM_STEPS = 3
give_streams_connections()
JOB = """
[job]
steps = 100
[model]
hidden_size = 64
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 128
vocab_size = 272
[parallel]
tp = 2
pp = 2
[batch]
microbatches = 4
tokens = 64
"""


def trained(folder, device, schedule="zb-h1", numerics: Numerics = "fast", parallel=(2, 2)):
    """Losses and parameters, by rank, after some steps of all ranks in this process.

    `parallel` is the TP degree and the number of stages.
    """
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "a.txt").write_bytes(bytes(33 + i * i % 90 for i in range(9000)))
    job = loads(JOB)
    tp, pp = parallel
    job = replace(job, parallel=replace(job.parallel, schedule=schedule, tp=tp, pp=pp))
    model = build_model(job.model)
    batch = job.batch.batch()
    plan = initial_plan(job.model.shape("x"), job.parallel.mesh(), batch, schedule=schedule)
    packing = Packing(load_dataset(str(folder / "text")), job.batch.tokens, 0)
    batches = GlobalBatches(packing, Sampler(packing.num_windows, 0), 1, job.batch.microbatches)
    states = {}

    def work(program, groups):
        state = states[program.rank] = TrainState(job)
        holding = initial_holding(model, job, program, device)
        state.prepare(1, holding)
        state.go()
        return TrainingWork(
            model,
            plan,
            holding,
            state,
            batches,
            groups,
            numerics=numerics,
            device=device,
        )

    runs = asyncio.run(run_local(model, plan, work, NUM_STEPS, device))
    losses = {rank: [record.loss for record in run.records] for rank, run in runs.items()}
    parameters = {
        (rank, name): p.cpu()
        for rank, state in states.items()
        for name, p in state.current.parameters.items()
    }
    return losses, parameters


def test_ranks_of_one_process_agree_on_their_losses(tmp_path):
    """The vote gives all the same record; a second run gives it again (on CPU)."""
    losses, parameters = trained(tmp_path, torch.device("cpu"))
    first = losses[0]
    assert len(first) == NUM_STEPS
    assert all(of_rank == first for of_rank in losses.values())
    again, parameters_again = trained(tmp_path, torch.device("cpu"))
    assert again == losses
    assert all(torch.equal(parameters_again[key], p) for key, p in parameters.items())


@pytest.mark.parametrize("numerics", ["fast", "bitwise"])
def test_ranks_of_one_process_train_as_one_rank_does(tmp_path, numerics):
    """Tensors change hands unchanged, whatever their sender does next."""
    losses, _ = trained(tmp_path, torch.device("cpu"), numerics=numerics)
    alone, _ = trained(tmp_path, torch.device("cpu"), numerics=numerics, parallel=(1, 1))
    for of_rank in losses.values():
        assert of_rank == pytest.approx(alone[0], rel=1e-5)


def test_without_a_gpu_a_cuda_job_is_refused():
    """The user's fault, said as such."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="no CUDA device"):
        CudaDevice("job", 0, timeout_s=1.0, num_local_ranks=1)


def test_all_communicators_refuse_before_one_is_aborted():
    """What an abort leaves as garbage must not be reduced, nor voted on, by those still alive."""
    done: list[str] = []

    class Ends:
        def refuse(self) -> None:
            done.append("refuse")

        def abort(self) -> None:
            done.append("abort")

    for thread in abort_all([Ends() for _ in range(5)]):
        thread.join()
    assert done == ["refuse"] * 5 + ["abort"] * 5


@pytest.mark.gpu
def test_streams_of_all_pairs_run_apart():
    """A pair that waits for a message holds up no other, nor compute: no two share a connection."""
    gate_queue = CudaQueue(GPU)
    queues = [CudaQueue(GPU), *(CudaQueue(GPU, is_urgent=True) for _ in range(MAX_EDGES + 1))]
    assert len({queue.stream.cuda_stream for queue in queues}) == len(queues)
    numbers = torch.zeros(1, device=GPU)
    torch.cuda.synchronize(GPU)
    for waiting in queues:
        with gate_queue.active():
            torch.cuda._sleep(200_000_000)
        gate = gate_queue.record()
        waiting.wait(gate)
        with waiting.active():
            numbers.add_(1.0)
        others = [queue for queue in queues if queue is not waiting]
        for queue in others:
            with queue.active():
                numbers.add_(1.0)
            queue.record().synchronize()
        assert not gate.query(), "somebody waited for the gate"
        gate.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["fast", "bitwise"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b", "zbv"])
def test_a_pipeline_on_cuda_trains_as_on_cpu(tmp_path, schedule, numerics):
    """Losses and every parameter, within the roundings of other kernels."""
    losses, parameters = trained(tmp_path, GPU, schedule, numerics)
    expected_losses, expected = trained(tmp_path, torch.device("cpu"), schedule, numerics)
    for rank, of_rank in losses.items():
        assert of_rank == pytest.approx(expected_losses[rank], rel=1e-4)
    assert parameters.keys() == expected.keys()
    for key, parameter in parameters.items():
        torch.testing.assert_close(parameter, expected[key], rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_stream_issues_before_the_device_has_done_its_work():
    """The event is there while the kernel sleeps; its mark comes after it."""
    stream = IssuingStream("compute", CudaQueue(GPU))
    event = stream.submit(lambda: torch.cuda._sleep(200_000_000), label=0)
    event.wait()
    assert not event.mark.query()
    event.mark.synchronize()
    assert event.mark.query()


@pytest.mark.gpu
def test_a_stream_waits_for_another_on_the_device():
    """The result of a slow kernel is read right, with no host wait between."""
    compute, comm = (IssuingStream(name, CudaQueue(GPU)) for name in ("compute", "comm"))

    def slow() -> torch.Tensor:
        torch.cuda._sleep(200_000_000)
        return torch.full((1 << 20,), 7.0, device=GPU)

    made = compute.submit(slow, label=0)
    read = comm.submit(lambda: made.wait().sum(), waits=[made], label=0)
    total = read.wait()
    assert not made.mark.query()
    read.mark.synchronize()
    assert float(total) == 7.0 * (1 << 20)


@pytest.mark.gpu
def test_observed_times_are_on_the_monotonic_clock():
    """Between what the host saw before and after, and as long as the kernel."""
    stream = IssuingStream("compute", CudaQueue(GPU), run_ahead=1)
    stream.observation = observation = Observation(2)
    before_ns = time.monotonic_ns()
    for label in range(2):
        stream.submit(lambda: torch.cuda._sleep(20_000_000), label=label)
    stream.when_idle().wait()
    after_ns = time.monotonic_ns()
    stream.submit(lambda: None, label=1).wait()
    assert before_ns <= observation.starts_ns[0] < observation.ends_ns[0] <= after_ns


@pytest.mark.gpu
def test_nccl_runs_on_the_current_stream():
    """A communicator of one member: every operation of the interface, and a message to itself."""
    with torch.cuda.device(GPU), torch.cuda.stream(torch.cuda.Stream(GPU)):
        group = NcclCommunicator(new_unique_id(), [0], 0, timeout_s=60.0)
        group.connect()
        tensor = torch.arange(6.0, device=GPU)
        group.all_reduce_(tensor)
        assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert group.all_gather(tensor.bfloat16()).tolist() == [tensor.tolist()]
        assert [part.tolist() for part in group.all_to_all([tensor], [6])] == [tensor.tolist()]
        group.abort()
        with pytest.raises(CommError, match="aborted"):
            group.all_reduce_(tensor)
